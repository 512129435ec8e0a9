"""What comes out is what training reads: the real small target's template and tokenizer on regenerated rows."""

from tests.places import small_target
from tests.train.regenerate.conftest import conversation
from tests.train.regenerate.server import FakeServer
from train.data.config import DataConfig
from train.data.pipeline import load_dataset


def test_training_supervises_the_answers_of_the_target(call):
    from target_bridge.hf_source import load_tokenizer

    tokenizer = load_tokenizer(str(small_target()))
    rows = [conversation(n, turns=2) for n in range(4)]
    with FakeServer(fault=lambda body, n: "400" if "3.0" in body["messages"][0]["content"] else None) as server:
        done = call(rows, [server], "--max-error-share", "0.5")
    # the folder holds the errors, the options and the summary as well
    data = load_dataset(DataConfig(str(call.output.parent), min_loss_tokens=1), tokenizer, len(tokenizer))
    assert (data.summary.rows, data.summary.kept, data.summary.refused_rows) == (3, 3, 0)
    for sample in data.samples:
        supervised = tokenizer.decode(sample.input_ids[sample.loss_mask == 1])
        answers = [m["content"] for m in done.rows[sample.id.split("#")[0]]["messages"] if m["role"] == "assistant"]
        assert supervised == "".join(f"{answer}<|im_end|>" for answer in answers)
