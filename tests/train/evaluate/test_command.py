"""`draft-jax eval` from its arguments to its files."""

import json
import re

import pytest

from draft_jax.config import DraftConfig
from train.evaluate.command import main
from train.evaluate.config import EvalConfig
from train.evaluate.draft import load_draft
from train.evaluate.options import eval_options, parser
from train.evaluate.terminal import format_result
from train.export import export

pytestmark = pytest.mark.usefixtures("quick_compilation")


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
        "--batch-size",
        "4",
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
    assert sorted(path.name for path in output.parent.iterdir()) == ["eval.json", "eval.rows"]
    rows = [json.loads(line) for line in (output.parent / "eval.rows" / "rows-1-of-1.jsonl").read_text().splitlines()]
    assert sorted((row["kind"], row["prompt"]) for row in rows) == sorted(
        (kind, sample["prompt"]) for kind in ("draft", "plain") for sample in record["samples"]
    )
    assert record["token_texts"]
    assert record["missing"] == 0


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
    assert re.search(r"accept length \(bonus included, per round\) +-\n", printed)


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
        main([*arguments, "--device", "cuda"])


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
    run["eval"] |= {"prompts": "few.jsonl", "limit": 4}
    assert eval_options(args, run).prompts == "few.jsonl"
    for option in ("--tasks", "--tasks-folder"):
        named = eval_options(parser().parse_args(["--draft", "x", option, "y"]), run)
        assert (named.prompts, named.limit, named.seed) == (None, None, 5), "the run's few prompts are not these tasks"


_TIMED = (
    "tokens_per_second_draft", "tokens_per_second_plain", "speedup", "rounds_per_second", "draft_share", "seconds",
    "plain_seconds", "compiled",
)  # fmt: skip


def assert_same(one, two):
    """Two results are equal, but for times, how they were run, and the last digits of confidences: a matrix product of
    another batch size rounds otherwise."""
    records, confidences = [], []
    for path in (one, two):
        record = json.loads(path.read_text())
        for name in _TIMED:
            record.pop(name)
        record["settings"].pop("batch_size"), record["settings"].pop("processes")
        for sample in record["samples"]:
            sample.pop("seconds"), sample.pop("plain_seconds")
        rounds = [item for sample in record["samples"] for item in sample["rounds"]]
        confidences.append([value for item in rounds for value in item.pop("confidence_logits")])
        for difference in record["differences"]:
            difference.pop("margin")
        records.append(record)
    assert records[0] == records[1]
    assert confidences[0] == pytest.approx(confidences[1], abs=1e-4)


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_shares_put_together_are_the_whole(arguments, tmp_path, temperature, capsys):
    """Two processes' worth of shares, of other batch sizes, then --resume with nothing left: the same result."""
    arguments = [*arguments, "--temperature", temperature, "--output"]
    assert main([*arguments, str(tmp_path / "whole.json")]) == 0
    shared = [*arguments, str(tmp_path / "shared.json"), "--resume"]
    for share, batch in (("2/2", "1"), ("1/2", "4")):
        assert main([*shared, "--share", share, "--batch-size", batch]) == 0
        assert f"share {share[0]} of 2 is done" in capsys.readouterr().out
        assert not (tmp_path / "shared.json").exists()
    assert main([*shared, "--no-plain"]) == 0
    assert main([*shared]) == 0
    assert_same(tmp_path / "shared.json", tmp_path / "whole.json")
    assert sorted(path.name for path in (tmp_path / "shared.rows").iterdir()) == [
        "identity.json", "rows-1-of-1.jsonl", "rows-1-of-2.jsonl", "rows-2-of-2.jsonl",
    ]  # fmt: skip
    assert "tokens/s with the draft, per process" in capsys.readouterr().out, "seconds are summed over the shares"
    assert json.loads((tmp_path / "shared.json").read_text())["settings"]["processes"] == 2


@pytest.mark.slow
def test_processes_put_together_are_the_whole(arguments, tmp_path, cli):
    """The same through processes of their own: what `--processes 2` writes is what one process writes."""
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    for output, processes in ((one, "1"), (two, "2")):
        done = cli(
            "eval", *arguments, "--temperature", "1", "--output", str(output), "--processes", processes, timeout=600
        )
        assert done.code == 0, done.err
    assert_same(two, one)


def test_a_killed_evaluation_goes_on_where_it_stopped(arguments, tmp_path, monkeypatch):
    """Killed after three decodings, the last line torn: without --resume it is refused, with it nothing is decoded
    twice, under other settings it is refused by name."""
    from train.evaluate import journal

    whole, output = tmp_path / "whole.json", tmp_path / "killed.json"
    assert main([*arguments, "--output", str(whole)]) == 0
    write = journal.Journal._write
    written = []

    def dies(self, row):
        if len(written) == 3:
            self._file.write('{"kind": "draft", "prom')
            raise KeyboardInterrupt
        written.append(row["prompt"])
        write(self, row)

    monkeypatch.setattr(journal.Journal, "_write", dies)
    with pytest.raises(KeyboardInterrupt):
        main([*arguments, "--output", str(output)])
    assert len(written) == 3
    again = []
    monkeypatch.setattr(journal.Journal, "_write", lambda self, row: again.append(row["prompt"]) or write(self, row))
    with pytest.raises(ValueError, match=r"killed\.rows holds 3 rows of an evaluation that was not finished"):
        main([*arguments, "--output", str(output)])
    for option, value, message in (
        ("--max-new-tokens", "9", r"max_new_tokens was 10, now 9"),
        ("--temperature", "1", r"temperature was 0\.0, now 1\.0"),
        ("--limit", "2", r"prompts_digest was '\w+', now"),
    ):
        with pytest.raises(ValueError, match=message):
            main([*arguments, "--output", str(output), "--resume", option, value])
    with pytest.raises(ValueError, match="draft_digest was"):
        main([*arguments, "--output", str(output), "--resume", "--untrained"])
    assert not again
    assert main([*arguments, "--output", str(output), "--resume"]) == 0
    assert len(again) == 2 * 4 - 3
    assert_same(output, whole)
    assert main([*arguments, "--output", str(output)]) == 0, "a finished one is replaced"


def test_a_partial_result_is_written_after_each_task(arguments, tmp_path, prompts_file, monkeypatch):
    """Two tasks; the evaluation dies in the second: the first one's figures are there, and say what is missing."""
    from train.evaluate import passes

    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, rows in (("one", 3), ("two", 2)):
        lines = prompts_file.read_text().splitlines(keepends=True)[:rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    without_prompts = [a for a in arguments if a not in ("--prompts", str(prompts_file))]
    output = tmp_path / "tasks.json"
    run = passes.Passes.run

    def dies(self, jobs):
        if jobs[0].prompt.task == "two":
            raise RuntimeError("power cut")
        run(self, jobs)

    monkeypatch.setattr(passes.Passes, "run", dies)
    options = [*without_prompts, "--tasks-folder", str(folder), "--output", str(output)]
    with pytest.raises(RuntimeError, match="power cut"):
        main(options)
    record = json.loads(output.read_text())
    assert (record["prompts"], record["missing"]) == (3, 2)
    assert list(record["tasks"]) == ["one"]
    monkeypatch.setattr(passes.Passes, "run", run)
    assert main([*options, "--resume"]) == 0
    record = json.loads(output.read_text())
    assert (record["prompts"], record["missing"]) == (5, 0)
    assert {name: task["prompts"] for name, task in record["tasks"].items()} == {"one": 3, "two": 2}
    assert record["settings"]["prompts"] == "one, two"
    assert record["settings"]["left_out"] == []


def test_what_tasks_leave_out_is_told_and_kept(arguments, tmp_path, prompts_file, capsys):
    """Rows beyond a known task's cap, rows that are no prompts, turns not asked: printed, and in the result; and the
    mean of the tasks beside the pooled figure."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "aime25.jsonl").write_text("".join(json.dumps({"turns": [f"w{i + 6} w9"]}) + "\n" for i in range(32)))
    (folder / "mine.jsonl").write_text('{"turns": ["w6", "w7"]}\nno JSON\n')
    without_prompts = [a for a in arguments if a not in ("--prompts", str(prompts_file))]
    output = tmp_path / "out.json"
    options = ["--tasks-folder", str(folder), "--limit", "2", "--no-plain", "--output", str(output)]
    assert main([*without_prompts, *options]) == 0
    record, printed = json.loads(output.read_text()), capsys.readouterr()
    assert record["settings"]["left_out"] == [
        "1 row(s) refused: mine: not JSON (first: line 2)",
        "2 row(s) beyond what DeepSpec asks of the task(s): a fixed random choice is asked",
        "1 later user turn(s) not asked: a row of turns asks its first",
    ]
    assert all(line in printed.err for line in record["settings"]["left_out"])
    lengths = [task["accept_length"] for task in record["tasks"].values()]
    assert record["accept_length_task_mean"] == sum(lengths) / 2
    assert re.search(rf"mean of tasks \(paper's average\) +{sum(lengths) / 2:.3f}", printed.out)


def test_what_is_not_there_is_said_before_a_target_is_loaded(arguments, tmp_path, prompts_file):
    elsewhere = ["--target", str(tmp_path / "no-target")]
    without_prompts = [a for a in arguments if a not in ("--prompts", str(prompts_file))]
    for options, message in (
        (["--tasks", "mbpp,mine.jsonl,alpaca"], r"'mbpp', 'mine.jsonl', 'alpaca' .*draft-jax tasks get mbpp alpaca "),
        (["--prompts", "none.jsonl"], r"prompts file none\.jsonl does not exist"),
        (["--prompts", str(prompts_file), "--tasks", "mbpp"], r"give one of the two"),
    ):
        with pytest.raises(ValueError, match=message):
            main([*without_prompts, *elsewhere, *options])


def test_a_closed_pipe_does_not_cost_the_result(arguments, tmp_path, monkeypatch):
    """`draft-jax eval ... | head -1`: files are written before the table."""
    from train.evaluate import terminal

    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr(terminal, "format_result", closed)
    output, report = tmp_path / "out.json", tmp_path / "out.html"
    with pytest.raises(BrokenPipeError):
        main([*arguments, "--limit", "2", "--no-plain", "--output", str(output), "--report", str(report)])
    assert json.loads(output.read_text())["missing"] == 0
    assert report.exists()


def test_later_turns_are_asked_after_the_drafted_answers(arguments, tmp_path, draft_folder):
    """The second prompt is the template's text of question, decoded answer and next question, tokenised anew."""
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps({"id": "q", "turns": ["w8 w9", "w30"]}) + "\n" + json.dumps({"turns": ["w11"]}) + "\n")
    chosen = [a if not a.endswith("prompts.jsonl") else str(path) for a in arguments]
    output = tmp_path / "turns.json"
    assert main([*chosen, "--output", str(output)]) == 0
    assert json.loads(output.read_text())["prompts"] == 2
    assert main([*chosen, "--all-turns", "--output", str(output)]) == 0
    samples = {sample["prompt"]: sample for sample in json.loads(output.read_text())["samples"]}
    assert len(samples) == 3
    later = samples["q#turn2"]
    assert later["text"] == "w30"
    assert later["prompt_tokens"] > samples["q"]["prompt_tokens"]
    assert later["output_tokens"] == later["plain_tokens"]


@pytest.mark.parametrize("option", [["--resume"], ["--processes", "2"], ["--share", "1/2"]])
def test_rows_need_a_place(arguments, option):
    with pytest.raises(ValueError, match="name it with --output"):
        main([*arguments, *option])


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b"])
def test_shares_that_are_none(text, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["--draft", "x", "--share", text])
    assert "is no share: give I/N" in capsys.readouterr().err


def test_deepspec_protocol_is_its_settings(arguments):
    """dspark_spec 5.1: defaults, seeds, nothing of the run's own; what is given besides wins and is noted."""
    from train.evaluate.options import deviations

    args = parser().parse_args(["--draft", "x", "--protocol", "deepspec"])
    options = eval_options(args, {"eval": {"max_new_tokens": 7, "seed": 3}})
    assert (options.temperature, options.max_new_tokens, options.confidence_threshold) == (1.0, 2048, 0.0)
    assert (options.seed, options.seed_by, options.template) == (980406, "index", "auto")
    assert (options.draft_sampling, options.count_overshoot) == ("float32", False)
    assert deviations(args, options, "bfloat16") == {}
    assert deviations(args, options, "float32") == {"target_dtype": "float32"}, "DeepSpec evaluates in bfloat16"
    args = parser().parse_args(
        ["--draft", "x", "--protocol", "deepspec", "--draft-sampling", "bfloat16", "--count-overshoot", "--limit", "5"]
    )
    options = eval_options(args, None)
    assert (options.draft_sampling, options.count_overshoot) == ("bfloat16", True)
    assert deviations(args, options, "bfloat16") == {"limit": 5}


def test_deepspec_protocol_wants_its_nine_tasks(arguments, prompts_file, tmp_path):
    without_prompts = [a for a in arguments if a not in ("--prompts", str(prompts_file))]
    (tmp_path / "gsm8k.jsonl").write_text(prompts_file.read_text())
    with pytest.raises(ValueError, match=r"task '.*' is no file and not in the tasks folder"):
        main([*without_prompts, "--protocol", "deepspec", "--tasks-folder", str(tmp_path)])
    output = tmp_path / "out.json"
    options = ["--protocol", "deepspec", "--tasks", "gsm8k", "--tasks-folder", str(tmp_path), "--output", str(output)]
    assert main([*without_prompts, *options]) == 0
    settings = json.loads(output.read_text())["settings"]
    assert (settings["protocol"], settings["seed_by"], settings["temperature"]) == ("deepspec", "index", 1.0)
    assert settings["protocol_deviations"] == {"max_new_tokens": 10, "tasks": "gsm8k", "target_dtype": "float32"}


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
        ({"batch_size": 0}, "batch_size is 0"),
        ({"every": -1}, "every is -1"),
        ({"seed_by": "line"}, "seed_by is 'line'"),
        ({"draft_sampling": "float16"}, "draft_sampling is 'float16'"),
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
    from train.evaluate.result import Difference, EvalResult
    from train.evaluate.sample_result import SampleResult, Seconds

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
