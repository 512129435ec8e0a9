"""SGLang's counts in our definitions: against every decoding of a small space, settled by our own rules."""

import itertools
import random

import pytest

from target_bridge.serving.server import ServedOutput
from tests import fake_sglang
from train.evaluate.accounting import accept_statistics, settle_round
from train.serve_check.accounting import (
    AccountingError,
    ServedSample,
    read_plain,
    read_served,
    served_statistics,
    standard_error,
)  # fmt: skip

K, EOS = 2, 9
FAKE = fake_sglang.load()


def ours(first, raw_rounds, budget):
    """The same raw rounds by our evaluator's rules: (output, settled rounds)."""
    tokens, rounds, remaining = [first], [], budget - 1
    finish = "eos" if first == EOS else "length" if not remaining else None
    for drafts, accepted, bonus in raw_rounds:
        if finish:
            break
        kept = drafts[:remaining]  # our decoder does not verify proposals past the budget
        settled = settle_round(kept, min(accepted, len(kept)), bonus, {EOS}, remaining)
        rounds.append(settled)
        tokens += settled.tokens
        remaining -= settled.length
        finish = settled.finish
    assert finish
    return tokens, rounds, finish


def served(first, raw_rounds, budget, name="p", stop_first=False):
    tokens, meta = FAKE.replay(first, raw_rounds, budget, {EOS}, K, stop_first)
    return read_served(name, ServedOutput(tokens, meta), [EOS], budget, K)


def one_round():
    """Every round of K drafts: which are accepted, and where a stop id stands."""
    for accepted in range(K + 1):
        for place in (None, *range(accepted + 1)):
            drafts, bonus = [1] * K, 2
            if place is not None and place < accepted:
                drafts[place] = EOS
            elif place is not None:
                bonus = EOS
            yield drafts, accepted, bonus


def every_decoding():
    for budget in range(1, 8):
        for rounds in itertools.product(list(one_round()), repeat=3):
            for first in (3, EOS):
                yield first, [*rounds, *[([1] * K, 0, 2)] * budget], budget


@pytest.mark.parametrize("stop_first", [False, True], ids=["0.5.16", "0.5.23"])
def test_every_decoding_counts_as_we_count_it(stop_first):
    """Output, rounds, committed tokens and finish, whatever stops it where."""
    seen = past_stop = cut = 0
    for first, rounds, budget in every_decoding():
        tokens, settled, finish = ours(first, rounds, budget)
        sample = served(first, rounds, budget, stop_first=stop_first)
        assert list(sample.tokens) == tokens
        assert sample.rounds == len(settled)
        assert sample.committed == sum(item.length for item in settled)
        assert sample.finish == finish
        seen += 1
        past_stop += sample.past_stop > 0
        cut += sum(h * (a + 1) for a, h in enumerate(sample.histogram)) > sample.committed
    assert seen == 7 * 9**3 * 2
    assert (past_stop == 0) == stop_first, "only 0.5.16 keeps tokens after a stop id, and such rounds are among them"
    assert cut > 1000


def test_accept_length_of_many_requests_equals_ours():
    draw = random.Random(0)
    cases = draw.sample(list(every_decoding()), 400)
    rounds = [item for case in cases for item in ours(*case)[1]]
    statistics = served_statistics([served(*case) for case in cases], K)
    expected = accept_statistics(rounds, K)
    assert statistics.accept_length == pytest.approx(expected.accept_length, abs=1e-12)
    assert (statistics.rounds, statistics.committed) == (expected.rounds, expected.committed)
    assert statistics.accept_length_as_reported > statistics.accept_length, "the server counts the prefill's token"
    assert statistics.accept_length_whole_rounds > statistics.accept_length, "and, on average, what was cut"


def test_slots_by_hand():
    """Four rounds accept 0, 2, 1, 2 drafts; nothing is cut: slot 0 passes in 3 of 4, slot 1 in 2 of those 3."""
    rounds = [([1, 1], accepted, 2) for accepted in (0, 2, 1, 2)]
    sample = served(3, rounds, 1 + 1 + 3 + 2 + 3)
    assert sample.histogram == (1, 1, 2)
    statistics = served_statistics([sample], K)
    assert statistics.survival == (3 / 4, 2 / 4)
    assert statistics.conditional == (3 / 4, 2 / 3)
    assert statistics.accept_length == 9 / 4
    assert statistics.accept_length_whole_rounds == 9 / 4
    assert statistics.accept_length_as_reported == 10 / 4


def test_slots_equal_ours_where_no_round_is_cut():
    draw = random.Random(1)
    ours_all, theirs = [], []
    for index in range(50):
        rounds = [([1] * K, draw.randint(0, K), 2) for _ in range(6)]
        budget = 1 + sum(accepted + 1 for _, accepted, _ in rounds)
        ours_all += ours(3, rounds, budget)[1]
        theirs.append(served(3, rounds, budget, str(index)))
    expected = accept_statistics(ours_all, K)
    statistics = served_statistics(theirs, K)
    whole = [item for item in ours_all if item.proposed == K]  # ours leaves out proposals past the budget
    assert statistics.rounds == expected.rounds
    assert statistics.survival[0] == pytest.approx(accept_statistics(ours_all, K).survival[0])
    assert len(whole) < len(ours_all)


GOOD = {
    "finish_reason": {"type": "length", "length": 6}, "completion_tokens": 6, "spec_verify_ct": 2,
    "spec_accept_length": 3.0, "spec_num_correct_drafts": 3, "spec_correct_drafts_histogram": [0, 1, 1],
}  # fmt: skip


def test_a_consistent_answer_is_read():
    sample = read_served("p", ServedOutput([1, 2, 3, 4, 5, 6], GOOD), [EOS], 6, K)
    assert sample == ServedSample("p", (1, 2, 3, 4, 5, 6), 2, (0, 1, 1), "length", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finish_reason": {"type": "abort", "message": "NaN"}}, "it ended with .*abort"),
        ({"finish_reason": None}, "no finish_reason"),
        ({"finish_reason": {"type": "stop", "matched": 8}}, r"stopped at 8, which is none of .* \[9\]"),
        ({"finish_reason": {"type": "stop", "matched": EOS}}, "holds no stop id"),
        ({"completion_tokens": 5}, "completion_tokens 5, but 6 ids"),
        ({"num_retractions": 1}, "retracted 1 time"),
        ({"spec_verify_ct": 3}, "3 rounds, the histogram has 2"),
        ({"spec_num_correct_drafts": 4}, "spec_num_correct_drafts 4, the histogram has 3"),
        ({"spec_accept_length": 2.5}, "means something else by it"),
        ({"spec_correct_drafts_histogram": [0, 0, 1, 1]}, "accepted 3 of 2 drafts"),
        ({"spec_correct_drafts_histogram": [2], "spec_num_correct_drafts": 0}, "commit 2 tokens, but 5 came"),
        (
            {"spec_verify_ct": 4, "spec_accept_length": 1.5, "spec_correct_drafts_histogram": [0, 0, 4],
             "spec_num_correct_drafts": 8},
            "commit 12 tokens, but 5 came",
        ),
        ({"spec_verify_ct": None, "spec_correct_drafts_histogram": None}, "0 rounds .* but 5 came"),
    ],
)  # fmt: skip
def test_answers_that_contradict_themselves_are_refused(change, message):
    meta = {key: value for key, value in {**GOOD, **change}.items() if value is not None or key == "finish_reason"}
    with pytest.raises(AccountingError, match=f"prompt 'p' cannot be counted.*{message}"):
        read_served("p", ServedOutput([1, 2, 3, 4, 5, 6], meta), [EOS], 6, K)


@pytest.mark.parametrize(("budget", "message"), [(5, "6 tokens came back, 5 were"), (7, "by length after 6 of 7")])
def test_answers_of_the_wrong_length_are_refused(budget, message):
    with pytest.raises(AccountingError, match=message):
        read_served("p", ServedOutput([1, 2, 3, 4, 5, 6], GOOD), [EOS], budget, K)


def test_the_older_name_of_the_histogram_is_known():
    meta = {("spec_accept_histogram" if k == "spec_correct_drafts_histogram" else k): v for k, v in GOOD.items()}
    assert read_served("p", ServedOutput([1, 2, 3, 4, 5, 6], meta), [EOS], 6, K).histogram == (0, 1, 1)


def test_plain_outputs_are_cut_at_the_stop_id_too():
    """Plain decoding steps by one token, so it never passes a stop id."""
    meta = {"finish_reason": {"type": "stop", "matched": EOS}, "completion_tokens": 3}
    sample = read_plain("p", ServedOutput([1, 2, EOS], meta), [EOS], 6)
    assert (sample.tokens, sample.finish, sample.past_stop, sample.rounds) == ((1, 2, EOS), "eos", 0, 0)


def test_nothing_observed_is_none():
    statistics = served_statistics([ServedSample("p", (3,), 0, (0,) * (K + 1), "length", 0)], K)
    assert statistics.accept_length is None
    assert statistics.survival == (None, None)
    assert statistics.standard_error is None


def test_standard_error_covers_what_it_claims():
    """Of 300 repetitions, the true value lies within two standard errors about 95 times in a hundred."""
    draw = random.Random(3)

    def prompt():
        rounds, rate = draw.randint(5, 40), draw.uniform(0.2, 0.9)
        return sum(1 + (draw.random() < rate) for _ in range(rounds)), rounds

    population = [prompt() for _ in range(20000)]
    true = sum(c for c, _ in population) / sum(n for _, n in population)
    hits = 0
    for _ in range(300):
        pairs = draw.sample(population, 40)
        ratio = sum(c for c, _ in pairs) / sum(n for _, n in pairs)
        hits += abs(ratio - true) < 2 * standard_error(pairs)
    assert 0.90 < hits / 300 < 0.99
    assert standard_error([(3, 2), (0, 0)]) is None
