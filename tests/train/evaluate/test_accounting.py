"""Hand traces of the accept-length accounting (cases T22: rounds 0,2,3,1 give 2.5)."""

import pytest

from train.evaluate.accounting import Round, accept_statistics, settle_round

EOS = {9}


def trace(accepted: int, proposed: int = 4) -> Round:
    return settle_round(list(range(10, 10 + proposed)), accepted, 50, EOS, remaining=100)


def test_hand_trace_0_2_3_1():
    statistics = accept_statistics([trace(n) for n in (0, 2, 3, 1)], block_size=4)
    assert statistics.rounds == 4
    assert statistics.committed == 10
    assert statistics.accept_length == 2.5
    assert (statistics.proposed, statistics.proposal_length) == (16, 4.0)
    assert statistics.accepted == 6
    assert statistics.verify_rate == 10 / 20
    assert statistics.survival == (3 / 4, 2 / 4, 1 / 4, 0.0)
    assert statistics.conditional == (3 / 4, 2 / 3, 1 / 2, 0.0)


def test_committed_tokens_are_the_accepted_drafts_then_the_targets_own():
    item = settle_round([11, 12, 13], 2, 77, EOS, remaining=10)
    assert item == Round((11, 12, 77), proposed=3, accepted=2, drafts=(11, 12, 13))
    everything = settle_round([11, 12, 13], 3, 77, EOS, remaining=10)
    assert everything.tokens == (11, 12, 13, 77)


def test_stop_token_accepted_in_the_middle_ends_the_round_without_a_bonus():
    item = settle_round([11, 9, 13, 14], 3, 77, EOS, remaining=10)
    assert item == Round((11, 9), proposed=2, accepted=2, finish="eos", drafts=(11, 9))
    statistics = accept_statistics([item], block_size=4)
    assert statistics.accept_length == 2.0
    assert statistics.survival == (1.0, 1.0, None, None), "what follows the stop token was never judged"
    assert statistics.slot_rounds == (1, 1, 0, 0)


def test_a_rejected_stop_token_does_not_stop():
    item = settle_round([11, 9, 13], 1, 77, EOS, remaining=10)
    assert item == Round((11, 77), proposed=3, accepted=1, drafts=(11, 9, 13))


def test_stop_token_as_the_targets_own_token():
    item = settle_round([11, 12], 1, 9, EOS, remaining=10)
    assert item == Round((11, 9), proposed=2, accepted=1, finish="eos", drafts=(11, 12))


@pytest.mark.parametrize(
    ("accepted", "remaining", "tokens", "proposed", "kept"),
    [
        (3, 3, (11, 12, 13), 3, 3),  # the budget is full with drafts: no target token
        (3, 2, (11, 12), 2, 2),  # accepted beyond the budget is not counted
        (1, 2, (11, 77), 2, 1),
        (0, 1, (77,), 1, 0),
        (3, 1, (11,), 1, 1),
    ],
)
def test_the_token_budget_cuts_the_round(accepted, remaining, tokens, proposed, kept):
    item = settle_round([11, 12, 13], accepted, 77, EOS, remaining)
    drafts = (11, 12, 13)[:proposed]
    assert item == Round(tokens, proposed=proposed, accepted=kept, finish="length", drafts=drafts)
    assert item.length <= remaining


def test_confidence_is_cut_as_the_proposals_are():
    item = settle_round([11, 9, 13], 3, 77, EOS, 10, confidence_logits=[0.5, -1.0, 2.0])
    assert item.confidence_logits == (0.5, -1.0)
    assert settle_round([11, 12, 13], 0, 77, EOS, 2, confidence_logits=[1.0, 2.0, 3.0]).confidence_logits == (1.0, 2.0)
    assert settle_round([11], 1, 77, EOS, 2).confidence_logits is None


@pytest.mark.parametrize(
    ("accepted", "remaining", "tokens", "finish"),
    [(3, 1, (11, 12, 13, 77), "length"), (3, 4, (11, 12, 13, 77), "length"), (1, 3, (11, 77), None)],
)
def test_deepspec_counts_what_lies_past_the_budget(accepted, remaining, tokens, finish):
    """dspark_spec 5.1 step 9: a whole block is proposed whatever remains, and the lists are not trimmed."""
    item = settle_round([11, 12, 13], accepted, 77, EOS, remaining, overshoot=True)
    assert item == Round(tokens, proposed=3, accepted=accepted, finish=finish, drafts=(11, 12, 13))
    stopped = settle_round([11, 9, 13], 3, 77, EOS, 1, overshoot=True)
    assert stopped == Round((11, 9), proposed=2, accepted=2, finish="eos", drafts=(11, 9))


def test_ending_on_the_last_token_says_why():
    assert settle_round([11, 9], 2, 77, EOS, remaining=2).finish == "eos"
    assert settle_round([11, 12], 2, 77, EOS, remaining=4).finish is None
    assert settle_round([11, 12], 2, 77, EOS, remaining=3).finish == "length"


def test_a_round_without_proposals_commits_one_token_and_judges_no_slot():
    item = settle_round([], 0, 77, EOS, remaining=5)
    assert item == Round((77,), proposed=0, accepted=0)
    statistics = accept_statistics([item, item], block_size=2)
    assert statistics.accept_length == 1.0
    assert statistics.proposed == 0
    assert statistics.survival == (None, None)
    assert statistics.conditional == (None, None)


def test_no_rounds_give_no_numbers():
    statistics = accept_statistics([], block_size=2)
    assert statistics.accept_length is None
    assert statistics.verify_rate is None
    assert statistics.proposal_length is None


def test_token_weighted_not_averaged_over_samples():
    one, other = [trace(4)], [trace(0), trace(0), trace(0)]
    assert accept_statistics(one + other, block_size=4).accept_length == (5 + 1 + 1 + 1) / 4


def test_impossible_rounds_are_refused():
    with pytest.raises(ValueError, match="3 tokens accepted of 2 proposed"):
        settle_round([1, 2], 3, 4, EOS, 5)
    with pytest.raises(ValueError, match="0 remain"):
        settle_round([1, 2], 1, 4, EOS, 0)
    with pytest.raises(ValueError, match="proposed 3 tokens, the block has 2"):
        accept_statistics([Round((1,), proposed=3, accepted=0)], block_size=2)
