"""`draft-jax eval` from its arguments to its files."""

import json

import pytest

from draft_jax.config import DraftConfig
from train.evaluate.command import eval_options, format_result, main, parser
from train.evaluate.config import EvalConfig
from train.evaluate.draft import load_draft
from train.export import export


@pytest.fixture(scope="module")
def draft_folder(target_folder, make_params, tmp_path_factory):
    raw = json.loads((target_folder / "config.json").read_text())
    config = DraftConfig.from_target(
        raw, num_hidden_layers=1, target_layer_ids=(0, 2), block_size=3, mask_token_id=5, markov_rank=4,
        initializer_range=0.3, target_name=str(target_folder),
    )  # fmt: skip
    return export(make_params(config), config, tmp_path_factory.mktemp("draft") / "export").path


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"w{i + 6} w{i + 9} w{i + 20}"]}) + "\n" for i in range(4)))
    return path


@pytest.fixture(scope="module")
def arguments(draft_folder, prompts_file):
    return [
        "--draft",
        str(draft_folder),
        "--prompts",
        str(prompts_file),
        "--max-new-tokens",
        "10",
        "--device",
        "cpu",
    ]


def test_folder_to_table_json_and_report(arguments, tmp_path, capsys, target_folder):
    output, report = tmp_path / "deep" / "eval.json", tmp_path / "report.html"
    assert main([*arguments, "--output", str(output), "--report", str(report), "--limit", "3"]) == 0
    printed = capsys.readouterr().out
    assert "equal to plain greedy decoding" in printed
    assert "3 of 3" in printed
    assert "survival  conditional" in printed
    record = json.loads(output.read_text())
    assert record["prompts"] == len(record["samples"]) == 3
    assert record["identical_to_plain"] == 3
    assert record["settings"]["target"] == str(target_folder), "the target is the one the draft names"
    assert record["accept_length"] >= 1
    assert "Sample outputs" in report.read_text()
    assert [path.name for path in output.parent.iterdir()] == ["eval.json"]


def test_untrained_differs_and_says_so(arguments, tmp_path, capsys):
    output = tmp_path / "eval.json"
    assert main([*arguments, "--untrained", "--no-plain", "--output", str(output)]) == 0
    assert "untrained draft shaped as folder" in capsys.readouterr().out
    record = json.loads(output.read_text())
    assert record["tokens_per_second_plain"] is None
    assert "untrained" in record["settings"]["draft"]


def test_nothing_proposed_is_printed_as_an_error_and_exits_with_1(arguments, capsys):
    assert main([*arguments, "--confidence-threshold", "1.0", "--limit", "1"]) == 1
    printed = capsys.readouterr().out
    assert "ERROR: the draft proposed nothing" in printed
    assert "accept length (bonus included, per round)  -" in printed


def test_another_target_is_refused(arguments, tmp_path, target_folder):
    import shutil

    other = tmp_path / "other"
    shutil.copytree(target_folder, other)
    raw = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**raw, "vocab_size": 60}))
    with pytest.raises(ValueError, match=r"vocab|shape|size"):
        main([*arguments, "--target", str(other)])


def test_a_gpu_that_jax_does_not_see_is_refused(arguments):
    with pytest.raises(ValueError, match=r"--device cuda, but JAX .* sees no GPU"):
        main([*arguments[:-1], "cuda"])


def test_a_stored_head_of_another_target_is_refused(arguments, draft_folder, tmp_path):
    import shutil

    import numpy as np
    import safetensors.numpy

    folder = tmp_path / "with-head"
    shutil.copytree(draft_folder, folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = np.ones((61, 16), np.float32)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from the target's"):
        main(["--draft", str(folder), *arguments[2:]])


def test_options_come_from_the_run_then_from_the_command_line():
    args = parser().parse_args(["--draft", "x", "--temperature", "0.7", "--no-plain"])
    assert eval_options(args, None) == EvalConfig(temperature=0.7, plain=False)
    run = {"eval": {"max_new_tokens": 32, "temperature": 0.3, "seed": 5}}
    assert eval_options(args, run) == EvalConfig(max_new_tokens=32, temperature=0.7, seed=5, plain=False)


@pytest.mark.parametrize("content", [None, "x"])
def test_what_is_no_draft_is_refused(tmp_path, content):
    if content:
        (tmp_path / "notes.txt").write_text(content)
    with pytest.raises(ValueError, match="neither a run directory"):
        load_draft(tmp_path)


def test_steps_are_for_runs(draft_folder):
    with pytest.raises(ValueError, match="--step 5 is for run directories"):
        load_draft(draft_folder, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, r"temperature is -1\.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"confidence_threshold": 2.0}, r"confidence_threshold is 2\.0"),
        ({"limit": 0}, "limit is 0"),
        ({"max_context": 1}, "max_context is 1"),
        ({"seed": -1}, "seed is -1"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
    ],
)
def test_options_that_cannot_be_meant(fields, message):
    with pytest.raises(ValueError, match=message):
        EvalConfig(**fields)


def test_differences_are_explained(make_result):
    half = format_result(make_result(dtype="bfloat16", margin=0.01), "d")
    assert "p0: token 3 is 1, plain decoding has 2, plain logits 0.01 apart" in half
    assert "expected to happen in half precision" in half
    assert "please report it" in format_result(make_result(dtype="float32", margin=0.01), "d")
    tie = format_result(make_result(dtype="float32", margin=1e-6), "d")
    assert "1e-06 apart" in tie
    assert "please report it" not in tie


@pytest.fixture
def make_result():
    from train.evaluate.accounting import Round, accept_statistics
    from train.evaluate.result import Difference, EvalResult, SampleResult, Seconds

    def make(dtype, margin):
        rounds = [Round((1, 2), 3, 1, "length")]
        sample = SampleResult("p0", 3, 1, rounds, "length", Seconds(total=1.0), [1, 1, 3], Seconds(total=2.0))
        settings = {
            "target": "t",
            "target_dtype": dtype,
            "draft_dtype": dtype,
            "greedy": True,
            "temperature": 0.0,
        }
        difference = Difference("p0", 3, 1, 2, margin)
        return EvalResult(accept_statistics(rounds, 3), [sample], [], [difference], settings)

    return make
