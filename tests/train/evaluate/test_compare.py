"""Comparisons: pairing sees what unpaired intervals cannot, noise is called noise, other protocols are refused."""

import copy
import json

import numpy as np
import pytest

from tests.train.evaluate.made_results import made_result, written
from train.evaluate.compare import compare, format_comparison, main
from train.evaluate.result_file import NamedResult, ResultError, read_results


def named(name, result):
    return NamedResult(name, result)


@pytest.fixture(scope="module")
def baseline():
    return named("A", made_result(seed=1, prompts=60))


def test_a_real_difference_is_found_and_signed(baseline):
    better = named("B", made_result((0.9, 0.85, 0.8), seed=2, prompts=60))
    found = compare(baseline, better)
    values = [sum(r["committed"] for s in x.samples for r in s["rounds"]) / (60 * 12) for x in (baseline, better)]
    assert (found.overall.baseline, found.overall.other) == pytest.approx(values)
    assert found.overall.difference.value == pytest.approx(values[1] - values[0])
    assert found.overall.difference.low > 0
    assert "B accepts" in found.verdict
    assert "more than A: more than noise" in found.verdict
    assert "fewer than B" in compare(better, baseline).verdict


def test_noise_is_called_noise(baseline):
    """The same draft with other random numbers, 40 times: at most a few differences may look real."""
    real = 0
    for seed in range(40):
        again = named("again", made_result(seed=100 + seed, prompts=60))
        found = compare(baseline, again)
        real += bool(found.overall.difference.excludes_zero)
        if not found.overall.difference.excludes_zero:
            assert "within noise" in found.verdict
    assert real <= 8  # the baseline itself is one draw, so these are no 40 independent tries


def test_pairing_sees_a_small_steady_gain(baseline):
    """Every prompt gains one token in one of its rounds: unpaired intervals overlap, the paired one is narrow."""
    result = copy.deepcopy(baseline.result)
    for sample in result["samples"]:
        sample["rounds"][0]["committed"] += 1
    found = compare(baseline, named("B", result)).overall.difference
    assert found.value == pytest.approx(1 / 12)
    assert found.low == pytest.approx(found.high) == pytest.approx(1 / 12)


def test_equal_results_are_equal(baseline):
    assert compare(baseline, named("B", baseline.result)).verdict == "B and A accept exactly the same."


def test_tasks_and_their_mean(baseline):
    other = named("B", made_result(seed=3, prompts=60))
    found = compare(baseline, other)
    math, chat, mean = found.tasks
    assert (math.what, chat.what, mean.what) == ("math", "chat", "mean of tasks")
    assert math.prompts == chat.prompts == 30
    assert mean.difference.value == pytest.approx((math.difference.value + chat.difference.value) / 2)
    for task in (math, chat):
        sums = [x.sums() for x in (baseline, other)]
        chosen = sums[0].tasks == task.what
        assert task.baseline == pytest.approx(sums[0].committed[chosen].sum() / sums[0].rounds[chosen].sum())
    text = format_comparison(found)
    assert "Of 2 intervals by task" in text
    assert "mean of tasks" in text


def test_few_prompts_say_nothing():
    few = [named(name, made_result(seed=i, prompts=9)) for i, name in enumerate("AB")]
    found = compare(*few)
    assert found.overall.difference.low is None
    assert "9 prompt(s) are too few" in found.verdict


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", 0.0), ("max_new_tokens", 2048), ("target", "llama"), ("protocol", "deepspec"),
     ("template", "chatml"), ("draft_sampling", "bfloat16"), ("count_overshoot", True)],
)  # fmt: skip
def test_other_protocols_are_refused_by_name(baseline, key, value):
    other = named("B", made_result(seed=2, prompts=60, **{key: value}))
    with pytest.raises(ResultError, match=f"different protocols: {key} is .* and {value}"):
        compare(baseline, other)


def test_the_same_target_elsewhere_is_the_same(baseline):
    compare(baseline, named("B", made_result(prompts=60, target="/somewhere/Smol")))
    said = made_result(prompts=60, draft_sampling="float32", seed_by="prompt", template="auto", all_turns=False)
    assert compare(baseline, named("B", said)).notes == (), "what an older result leaves unsaid are the defaults"


def test_other_prompts_are_refused_or_left_out(baseline):
    fewer = named("B", made_result(seed=2, prompts=50))
    with pytest.raises(ResultError, match=r"different prompts: 60 and 50, 50 shared \(one not shared: p50\)"):
        compare(baseline, fewer)
    found = compare(baseline, fewer, shared_only=True)
    assert found.overall.prompts == 50
    assert "10 prompt(s) that only one of the two has were left out" in found.notes
    changed = copy.deepcopy(baseline.result)
    changed["samples"][3]["text"] = "Another question"
    with pytest.raises(ResultError, match=r"under the id p3: its text is 'Question 3 <why>\?' and 'Another question'"):
        compare(baseline, named("B", changed))
    digests = [made_result(prompts_digest=digest) for digest in ("x", "y")]
    with pytest.raises(ResultError, match="their prompts_digest differs"):
        compare(named("A", digests[0]), named("B", digests[1]))
    strange = copy.deepcopy(baseline.result)
    for sample in strange["samples"]:
        sample["prompt"] = "other-" + sample["prompt"]
    with pytest.raises(ResultError, match="share no prompt"):
        compare(baseline, named("B", strange), shared_only=True)


def test_no_measurement_is_refused(baseline):
    broken = {**baseline.result, "error": "the draft proposed nothing"}
    with pytest.raises(ResultError, match="B is no measurement: the draft proposed nothing"):
        compare(baseline, named("B", broken))
    bare = {key: value for key, value in baseline.result.items() if key != "samples"}
    with pytest.raises(ResultError, match="written without samples"):
        compare(baseline, named("B", bare))


def test_what_may_differ_is_said(baseline):
    other = named("B", made_result(prompts=60, seed=2, confidence_threshold=0.4))
    assert any("confidence_threshold differs (0.0 and 0.4)" in note for note in compare(baseline, other).notes)


def test_command(tmp_path, capsys):
    files = [
        written(tmp_path / run / "eval" / "step-9_t1.json", made_result(chances, prompts=20, seed=5))
        for run, chances in (("one", (0.5, 0.5)), ("two", (0.9, 0.9)), ("three", (0.5, 0.5)))
    ]
    assert main([*files, "--json", str(tmp_path / "c.json")]) == 0
    printed = capsys.readouterr().out
    assert "two/step-9_t1 accepts" in printed
    assert "three/step-9_t1 and one/step-9_t1 accept exactly the same." in printed
    assert "speed-up" in printed
    first, second = json.loads((tmp_path / "c.json").read_text())
    assert first["overall"]["difference"]["low"] > 0
    assert "exactly the same" in second["verdict"]


def test_files_and_names(tmp_path):
    path = written(tmp_path / "eval" / "a.json", made_result(prompts=2))
    assert [x.name for x in read_results([path, f"mine={path}"])] == ["a", "mine"]
    with pytest.raises(ResultError, match=r"two results are called .*NAME=PATH"):
        read_results([path, path])
    with pytest.raises(ResultError, match=r"is a folder; name a result in it: .*eval/a\.json"):
        read_results([str(tmp_path)])
    (tmp_path / "b.json").write_text('{"loss": 1}')
    with pytest.raises(ResultError, match="is no result of draft-jax eval"):
        read_results([str(tmp_path / "b.json")])
    with pytest.raises(ResultError, match="cannot be read"):
        read_results([str(tmp_path / "absent.json")])


def test_counts_per_prompt_are_those_of_the_accounting():
    result = made_result(seed=8, prompts=7)
    sums = named("x", result).sums()
    np.testing.assert_allclose(sums.passed.sum(0) / sums.proposed.sum(0), result["survival"])
    np.testing.assert_allclose(sums.passed.sum(0) / sums.reached.sum(0), result["conditional"])
    assert sums.committed.sum() / sums.rounds.sum() == pytest.approx(result["accept_length"])
