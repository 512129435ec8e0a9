"""Attempts and what is counted on them, against a trace written by hand."""

import pytest

from train.evaluate.accounting import Round, accept_statistics
from train.evaluate.result import EvalResult
from train.evaluate.result_file import NamedResult
from train.evaluate.sample_result import SampleResult, Seconds
from train.report.attempts import (
    Attempt,
    Group,
    attempts,
    by_context,
    by_kind,
    by_token,
    kind_intervals,
    kind_of,
    stretches,
)
from train.report.failures import conclude, failure_section

TEXTS = {"1": "The", "2": " cat", "3": " sat", "4": "\n", "5": "7", "6": ".", "7": "<|end|>", "8": "ness", "9": " dog"}


def result_of(*samples, K=3):
    made = [
        SampleResult(f"p{i}", 3, 1, list(rounds), "eos", Seconds(), task="t", text="why")
        for i, rounds in enumerate(samples)
    ]
    rounds = [r for s in samples for r in s]
    settings = {"block_size": K, "temperature": 0.0}
    result = EvalResult(accept_statistics(rounds, K), made, [], [], settings, token_texts=TEXTS)
    return NamedResult("d", result.to_json())


@pytest.fixture
def traced():
    return result_of([
        Round((2, 3, 6), 3, 2, drafts=(2, 3, 4)),  # "The" -> " cat" " sat", then "." where "\n" was proposed
        Round((5,), 3, 0, drafts=(9, 9, 9)),  # after "." "7" where " dog" was proposed
        Round((2, 3, 9, 4), 3, 3, drafts=(2, 3, 9)),  # all accepted, "\n" is the bonus: no attempt
        Round((8, 7), 2, 2, "eos", drafts=(8, 7)),
    ])  # fmt: skip


def test_attempts_by_hand(traced):
    found = [(a.slot, a.before, a.wrote, a.instead, a.hit) for a in attempts(traced)]
    assert found == [
        (0, "The", " cat", None, True),
        (1, " cat", " sat", None, True),
        (2, " sat", ".", "\n", False),
        (0, ".", "7", " dog", False),
        (0, "7", " cat", None, True),
        (1, " cat", " sat", None, True),
        (2, " sat", " dog", None, True),
        (0, "\n", "ness", None, True),
        (1, "ness", "<|end|>", None, True),
    ]


def test_attempts_agree_with_conditional_acceptance(traced):
    """Hits over tries by slot is what the accounting calls conditional acceptance."""
    for slot, expected in enumerate(traced.result["conditional"]):
        tries = [a for a in attempts(traced) if a.slot == slot]
        assert sum(a.hit for a in tries) / len(tries) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("before", "wrote", "kind"),
    [
        ("a", " cat", "starts of words"), ("a", "ness", "insides of words"), ("\n", "The", "starts of words"),
        ("a", "\n\n", "line breaks"), ("a", "  ", "spaces"), ("a", " 12", "digits"),
        ("a", ").", "punctuation and signs"),
        ("a", "<|im_end|>", "special tokens"), ("a", "<", "punctuation and signs"), ("a", "é", "insides of words"),
    ],
)  # fmt: skip
def test_kinds(before, wrote, kind):
    assert kind_of(Attempt(0, "", 0, before, wrote, None, True)) == kind


def test_groups(traced):
    kinds = {group.name: (group.tries, group.hits) for group in by_kind(attempts(traced))}
    assert kinds == {
        "starts of words": (6, 6), "punctuation and signs": (1, 0), "digits": (1, 0), "special tokens": (1, 1),
    }  # fmt: skip
    assert kind_intervals(attempts(traced))["digits"].value == 0.0


def test_few_tries_do_not_lead_the_list():
    tries = [Attempt(0, "", 0, "x", "rare", "no", False)] * 5 + [Attempt(0, "", 0, "y", "often", "nope", False)] * 40
    tries += [Attempt(0, "", 0, "y", "often", None, True)] * 2 + [Attempt(0, "", 0, "z", "fine", None, True)] * 50
    tries += [Attempt(0, "", 0, "x", "once", "no", False)] * 4
    ranked = by_token(tries)
    assert [group.name for group in ranked] == ["often", "rare"], (
        "4 tries are too few, and what never fails is no failure"
    )
    assert ranked[0].instead == [("nope", 40)]
    assert [group.name for group in by_context(tries)] == ["y", "x"]


def test_worst_stretch():
    rounds = [Round((2, 3), 3, 1, drafts=(2, 4, 4))] * 3 + [Round((5,), 3, 0, drafts=(9, 9, 9))] * 5
    item = result_of(rounds, [Round((2, 3, 9, 4), 3, 3, drafts=(2, 3, 9))] * 6, [Round((5,), 1, 0, drafts=(9,))])
    worst, best = stretches(item.samples)
    assert (worst.sample, worst.rounds, worst.committed) == (0, 5, 5)
    assert (worst.start, worst.end) == (7, 12)  # after the first token and three rounds of two
    assert worst.missed == dict.fromkeys(range(7, 12), 9)
    assert (best.sample, best.committed, best.missed) == (1, 20, {})


def test_section_shows_words_and_marks_the_misses(traced):
    rounds = [Round((5,), 3, 0, drafts=(9, 9, 9))] * 6
    page = "".join(failure_section([result_of(rounds)]))
    assert "<code>7</code></td>" in page
    assert "<code>␣dog</code> 6x" in page
    assert '<span class="missed"> dog</span><span class="target">7</span>' in page
    assert "In 1 of 1 outputs no draft at all was accepted for 5 rounds in a row." in page
    assert "“7”: 0 of 6 tries accepted; most often the draft says “␣dog”." in page
    assert failure_section([NamedResult("d", {**traced.result, "token_texts": {}})]) == []
    bare = {**traced.result, "samples": [{**s, "rounds": []} for s in traced.result["samples"]]}
    assert failure_section([NamedResult("d", bare)]) == []


def test_conclusions():
    starts, digits = Group("starts of words", 100, 60), Group("digits", 30, 6)
    text = conclude("d", [starts, digits])
    assert text == "d: 62% of all misses are at starts of words (60% accepted); accepted least are digits (20% of 30)."
    assert "which are also accepted least (60%)" in conclude("d", [starts, Group("digits", 30, 29)])
    assert "too few misses" in conclude("d", [Group("digits", 30, 30)])
