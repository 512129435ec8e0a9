"""In-loop evaluation: an exact accept length beside the loss, and a run that is the same to the bit without it."""

import json

import jax
import numpy as np
import pytest

from train import runtime
from train.checkpoint import CHECKPOINTS, best_step, complete_steps, load_trained
from train.config import ConfigError
from train.config_file import build
from train.evaluate import in_loop
from train.evaluate.protocol import evaluate
from train.evaluate.tasks import load_prompts
from train.loop import run
from train.metrics import Throughput

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def target(target_folder):
    config = build({"target": {"path": str(target_folder), "device": "cpu"}, "data": {"path": "x"}, "run_dir": "x"})
    return runtime.load_target(config, (0, 2), "cpu", "float32")


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"w{i + 6} w{i + 9}"]}) + "\n" for i in range(5)))
    return path


@pytest.fixture
def evaluating(tree, prompts_file):
    """The tree of a run that evaluates every two of six steps, and saves every four."""
    tree["eval"] = {"every": 2, "prompts": str(prompts_file), "max_new_tokens": 8, "batch_size": 4}
    tree["checkpoint"] = {"every": 4, "keep": 3, "keep_best": 1}
    return tree


def lines_of(run_dir) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def training_only(line: dict) -> dict:
    """A metrics line without what an evaluation adds, and without times."""
    timed = Throughput().result(1).keys()
    return {k: v for k, v in line.items() if k != "accept_length" and k not in timed and not k.startswith("eval_")}


_runs = {}


@pytest.fixture
def both(evaluating, tmp_path, target):
    """The same run with and without evaluations, made once: (result, lines, parameters) of each, and its folder."""
    for name, every in (("with", 2), ("without", 0)):
        if name not in _runs:
            run_dir = tmp_path / name
            config = {**evaluating, "run_dir": str(run_dir), "eval": {**evaluating["eval"], "every": every}}
            result = run(build(config), target=target)
            _runs[name] = result, lines_of(run_dir), load_trained(run_dir, "latest")[1]
    return _runs


def test_training_is_bit_identical(both):
    """Parameters, every logged number, and the two programs; the numbers of torch and numpy are not drawn from."""
    (ours, our_lines, our_params), (theirs, their_lines, their_params) = both["with"], both["without"]
    jax.tree.map(np.testing.assert_array_equal, our_params, their_params)
    assert [training_only(line) for line in our_lines] == [training_only(line) for line in their_lines]
    for result in (ours, theirs):
        assert (result.compiles["accumulate"], result.compiles["apply"]) == (1, 1)
    assert {line["step"] for line in our_lines if "accept_length" in line} == {2, 4, 6}
    assert not any("accept_length" in line for line in their_lines)
    assert not (ours.run_dir / in_loop.ERRORS).exists()


def test_the_number_is_the_evaluators(both, evaluating, target):
    """The last line's accept length is what `draft-jax eval` finds for the last checkpoint on the same prompts."""
    config = build(evaluating)
    draft, params = load_trained(both["with"][0].run_dir, "latest")
    prompts = load_prompts(config.eval.prompts, target.tokenizer).prompts
    result = evaluate(target, draft, params, None, prompts, config.eval)
    line = both["with"][1][-1]
    assert line["accept_length"] == result.accept_length
    assert (line["eval_step"], line["eval_rounds"]) == (6, result.rounds)


def test_the_best_checkpoint_is_chosen_by_accept_length(evaluating, tmp_path, target, monkeypatch):
    """Step 4 is said to be best, though later training metrics may be better."""
    truth = in_loop.InLoopEvaluation.run

    def staged(self, step, params, stopping):
        return {**truth(self, step, params, stopping), "accept_length": 9.0 if step == 4 else 1.5}

    monkeypatch.setattr(in_loop.InLoopEvaluation, "run", staged)
    evaluating["checkpoint"] = {"every": 2, "keep": 1, "keep_best": 1}
    run(build({**evaluating, "run_dir": str(tmp_path / "best")}), target=target)
    assert complete_steps(tmp_path / "best" / CHECKPOINTS) == [4, 6]
    assert best_step(tmp_path / "best" / CHECKPOINTS) == 4


def test_a_failure_is_logged_whole_and_training_goes_on(evaluating, both, tmp_path, target, monkeypatch, capfd):
    """The target fails in the second evaluation: its trace is kept, the third one measures, the parameters agree."""
    sessions = []
    real = target.open_session

    def broken(*arguments):
        sessions.append(arguments)
        if len(sessions) == 2:
            raise RuntimeError("the target's memory is gone")
        return real(*arguments)

    monkeypatch.setattr(target, "open_session", broken)
    monkeypatch.setattr("train.evaluate.passes.Passes._warm_up", lambda *_: None)
    result = run(build({**evaluating, "run_dir": str(tmp_path / "failing")}), target=target)
    assert result.exit_code == 0
    assert result.steps == 6
    found = {line["step"]: line for line in lines_of(tmp_path / "failing")}
    assert found[4]["eval_failed"] == 1
    assert "accept_length" not in found[4]
    assert found[6]["accept_length"] == both["with"][1][-1]["accept_length"]
    text = (tmp_path / "failing" / in_loop.ERRORS).read_text()
    assert "step 4, process 0" in text
    assert "Traceback" in text
    assert "the target's memory is gone" in text
    assert "WARNING step 4: in-loop evaluation failed, training goes on" in capfd.readouterr().err
    jax.tree.map(np.testing.assert_array_equal, load_trained(tmp_path / "failing", "latest")[1], both["with"][2])


def test_a_stop_request_does_not_wait_for_an_evaluation(evaluating, target, tmp_path):
    draft = build({**evaluating, "run_dir": "x"})
    from train.resolve import read_target_config, resolve_draft

    config = resolve_draft(draft, read_target_config(draft.target))
    from draft_jax.models.dspark import init_params

    told = []
    evaluation = in_loop.InLoopEvaluation(draft.eval, config, target, tmp_path, told.append)
    params = init_params(config, jax.random.key(0))
    asked = []
    metrics = evaluation.run(2, params, lambda: asked.append(1) or True)
    assert len(asked) == 1
    assert "accept_length" not in metrics
    assert not told, "a stop is no failure"
    assert not (tmp_path / in_loop.ERRORS).exists()


def test_prompts_that_cannot_be_read_stop_the_run_before_it_starts(evaluating, tmp_path, target):
    evaluating["eval"]["prompts"] = str(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"none\.jsonl does not exist"):
        run(build({**evaluating, "run_dir": str(tmp_path / "unread")}), target=target)


def test_processes_put_their_counts_together(evaluating, target, tmp_path):
    """Two shares, one gathering: the accept length of all prompts. A failed one leaves no number that misses some."""
    from draft_jax.models.dspark import init_params
    from train.resolve import read_target_config, resolve_draft

    whole = build(evaluating)
    draft = resolve_draft(whole, read_target_config(whole.target))
    params, counted = init_params(draft, jax.random.key(0)), []

    def evaluate_share(share, gather):
        evaluation = in_loop.InLoopEvaluation(
            whole.eval, draft, target, tmp_path, lambda _: None, share=share, gather=gather
        )
        return evaluation.run(2, params)

    alone = evaluate_share((0, 1), lambda value, what: [value])
    for rank in range(2):
        evaluate_share((rank, 2), lambda value, what: counted.append(value) or [value])
    assert all(0 < item.rounds < alone["eval_rounds"] for item in counted)
    together = evaluate_share((0, 2), lambda value, what: counted)
    assert together["accept_length"] == alone["accept_length"]
    assert together["eval_rounds"] == alone["eval_rounds"]
    broken = evaluate_share((0, 2), lambda value, what: [value, in_loop.Counts(failed=1)])
    assert broken["eval_failed"] == 1
    assert "accept_length" not in broken


@pytest.mark.parametrize(
    ("checkpoint", "evaluation", "message"),
    [
        ({"every": 200}, {"every": 300}, r"eval\.every is 300; checkpoint\.every is 200: make one a multiple"),
        (
            {"best_metric": "accept_length"},
            {},
            r"checkpoint\.best_metric is 'accept_length'; it is measured only while",
        ),
    ],
)
def test_a_best_checkpoint_that_could_not_be_chosen_is_refused(plain_tree, checkpoint, evaluation, message):
    with pytest.raises(ConfigError, match=message):
        build({**plain_tree, "checkpoint": checkpoint, "eval": evaluation})


def test_best_metric_follows_what_is_measured(plain_tree):
    assert build(plain_tree).best_metric == "tau_probabilistic"
    every = {"every": 500}
    assert build({**plain_tree, "eval": every, "checkpoint": every}).best_metric == "accept_length"
    named = {"every": 300, "best_metric": "ce_loss", "best_mode": "min"}
    assert build({**plain_tree, "eval": every, "checkpoint": named}).best_metric == "ce_loss"
