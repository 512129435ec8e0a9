"""The checker itself, and its verdict on real tokenizers with real answers."""

import json

import pytest

from tests.train.data.family_tokenizers import byte_tokenizer
from tests.train.data.qwen_tokenizer import qwen_tokenizer
from train.data import QUICKSTART_CONVERSATIONS
from train.data.encoding import Encoder
from train.data.templates import TemplateError, shipped_source
from train.data.verify import verify

ROWS = 400


def unmarked(name: str) -> str:
    return shipped_source(name).replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")


def test_smollm2_on_real_conversations(smollm2_tokenizer):
    verdict = verify(smollm2_tokenizer, str(QUICKSTART_CONVERSATIONS), rows=ROWS)
    assert not verdict.wrong
    assert (verdict.ids_equal, verdict.runs_exact, verdict.read_equal) == (ROWS, ROWS, ROWS)
    assert "smollm2 (text equal to the tokenizer's own on 400 rows, ids on every row, 400)" in verdict.format()


@pytest.mark.parametrize(("name", "thinking"), [("qwen2.5", None), ("qwen3", None), ("qwen3", False)])
def test_qwen_on_real_conversations(name, thinking):
    verdict = verify(qwen_tokenizer(unmarked(name)), str(QUICKSTART_CONVERSATIONS), rows=ROWS, thinking=thinking)
    assert not verdict.wrong
    assert (verdict.ids_equal, verdict.runs, verdict.read_equal) == (ROWS, ROWS, ROWS)
    assert verdict.template.startswith(f"{name} (text equal")
    if name == "qwen3" and thinking is None:
        assert verdict.runs_holding == ROWS  # each behind the empty think block that the model writes
    else:
        assert verdict.runs_exact + verdict.shared == ROWS


def rows_file(tmp_path, *messages):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in messages))
    return str(path)


CHAT = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]


def test_a_mask_that_is_one_off_is_wrong(tmp_path, monkeypatch):
    tokenizer, path = byte_tokenizer("qwen2.5"), rows_file(tmp_path, CHAT, [{"role": "user", "content": "Q"}])
    good = verify(tokenizer, path, rows=9)
    assert not good.wrong
    assert (good.conversations, good.refused, good.runs_exact, good.read_equal) == (2, 1, 1, 1)
    mask = Encoder._mask

    def shifted(self, *arguments):
        row = mask(self, *arguments)
        row.loss_mask[:] = [*row.loss_mask[1:], 0]
        return row

    monkeypatch.setattr(Encoder, "_mask", shifted)
    assert verify(tokenizer, path, rows=9).wrong[0] == "rows.jsonl:1: '\\n' is none of the answers that are left"


def test_other_ids_stop(tmp_path):
    tokenizer = byte_tokenizer("qwen2.5")
    with pytest.raises(TemplateError, match="does not render what the tokenizer's own does"):
        verify(tokenizer, rows_file(tmp_path, CHAT), rows=9, template="chatml")
