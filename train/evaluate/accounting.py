"""Accept-length accounting: the one place where a round is cut and where rounds become numbers.

Every figure of this project that is called accept length, survival or conditional acceptance comes from
`accept_statistics`, so two reports cannot mean different things by the same name.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

Finish = Literal["eos", "length"]


@dataclass(frozen=True)
class Round:
    """One draft-and-verify round, counted only as far as its tokens were kept.

    Attributes:
        tokens: ids committed by the round: the accepted drafts kept, then the target's own token if there is
            one.
        proposed: proposals that count: those whose fate could still be seen.
        accepted: accepted proposals that were kept.
        finish: why the sample ended with this round, or None.
        drafts: the `proposed` ids that count, accepted or not; empty when the decoder did not keep them.
        confidence_logits: the confidence head's raw logits of the same slots; None without that head.
    """

    tokens: tuple[int, ...]
    proposed: int
    accepted: int
    finish: Finish | None = None
    drafts: tuple[int, ...] = ()
    confidence_logits: tuple[float, ...] | None = None

    @property
    def length(self) -> int:
        """Accept length of the round: every token it committed, the target's own (bonus) token included."""
        return len(self.tokens)


def settle_round(
    draft_tokens: Sequence[int],
    accepted: int,
    next_token: int,
    eos_ids: Collection[int],
    remaining: int,
    *,
    confidence_logits: Sequence[float] | None = None,
    overshoot: bool = False,
) -> Round:
    """Cuts a verified round at the first stop token and at the token budget (dspark_spec 5.1, rules 7 and 8).

    A stop token among the accepted drafts ends the round there, inclusive, without the target's own token;
    the proposals after it count as not proposed, since nothing says whether they would have been accepted.
    Tokens past `remaining` are not kept and count neither as accepted nor as proposed (DeepSpec counts them:
    dspark_spec 8.2, defect 6).

    Args:
        draft_tokens: the proposed ids, in order.
        accepted: how many of them, from the left, passed verification.
        next_token: the target's token after the accepted ones (residual sample, or bonus).
        eos_ids: stop ids.
        remaining: tokens the sample may still generate, at least 1.
        confidence_logits: of the proposals; cut as they are.
        overshoot: count what lies past the budget, as DeepSpec does.

    Raises:
        ValueError: when `accepted` exceeds the proposals, or nothing may be generated any more.
    """
    if not 0 <= accepted <= len(draft_tokens):
        raise ValueError(f"{accepted} tokens accepted of {len(draft_tokens)} proposed")
    if remaining < 1:
        raise ValueError(f"a round needs room for at least one token, {remaining} remain")
    budget = len(draft_tokens) + 1 if overshoot else remaining
    proposed = min(len(draft_tokens), budget)
    kept = [int(token) for token in draft_tokens[: min(accepted, budget)]]
    finish: Finish | None = None
    stop = next((index for index, token in enumerate(kept) if token in eos_ids), None)
    if stop is not None:
        tokens = kept = kept[: stop + 1]
        proposed, finish = len(kept), "eos"
    else:
        tokens = kept
        if len(kept) < budget:  # otherwise the budget is full and the target's own token is past it
            tokens = [*kept, int(next_token)]
        if tokens[-1] in eos_ids:
            finish = "eos"
        elif len(tokens) >= remaining:
            finish = "length"
    return Round(
        tuple(tokens),
        proposed=proposed,
        accepted=len(kept),
        finish=finish,
        drafts=tuple(int(token) for token in draft_tokens[:proposed]),
        confidence_logits=None if confidence_logits is None else tuple(confidence_logits[:proposed]),
    )


@dataclass(frozen=True)
class AcceptStatistics:
    """Numbers of many rounds. Rates are None where nothing was observed, never a made-up 0 or 1.

    Attributes:
        rounds: verification rounds.
        committed: tokens those rounds committed.
        proposed: proposals that counted.
        accepted: proposals accepted and kept.
        accept_length: committed / rounds; the target's own token of a round is included, and the mean is
            weighted by rounds over the whole data set, not per sample.
        proposal_length: proposed / rounds.
        verify_rate: committed / (proposed + rounds), the share of verified positions that became output.
        survival: [K]; of the rounds that proposed slot k, the share that accepted slots 0..k.
        conditional: [K]; of the rounds that proposed slot k and accepted all before it, the share that
            accepted it.
        slot_rounds: [K]; rounds that proposed slot k: the denominators of `survival`.
    """

    rounds: int
    committed: int
    proposed: int
    accepted: int
    accept_length: float | None
    proposal_length: float | None
    verify_rate: float | None
    survival: tuple[float | None, ...]
    conditional: tuple[float | None, ...]
    slot_rounds: tuple[int, ...]


def accept_statistics(rounds: Sequence[Round], block_size: int) -> AcceptStatistics:
    """Accept length, survival and conditional acceptance of `rounds` (dspark_spec 5.2).

    Args:
        rounds: settled rounds of one or many samples; order does not matter.
        block_size: K, the number of slots reported.

    Raises:
        ValueError: when a round proposed more than `block_size` tokens.
    """
    proposed_at, reached_at, passed_at = ([0] * block_size for _ in range(3))
    for item in rounds:
        if item.proposed > block_size:
            raise ValueError(f"a round proposed {item.proposed} tokens, the block has {block_size}")
        for slot in range(item.proposed):
            proposed_at[slot] += 1
            reached_at[slot] += item.accepted >= slot
            passed_at[slot] += item.accepted > slot
    count = len(rounds)
    committed = sum(item.length for item in rounds)
    proposed = sum(item.proposed for item in rounds)
    return AcceptStatistics(
        rounds=count,
        committed=committed,
        proposed=proposed,
        accepted=sum(item.accepted for item in rounds),
        accept_length=_ratio(committed, count),
        proposal_length=_ratio(proposed, count),
        verify_rate=_ratio(committed, proposed + count),
        survival=tuple(_ratio(passed, total) for passed, total in zip(passed_at, proposed_at)),
        conditional=tuple(_ratio(passed, total) for passed, total in zip(passed_at, reached_at)),
        slot_rounds=tuple(proposed_at),
    )


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None
