"""What SGLang reports of a request -> our definitions of rounds, accept length and survival.

SGLang (0.5.16 and 0.5.23 alike) counts per request `spec_verify_ct` verification rounds, and a histogram: how
many rounds accepted 0, 1, .., K drafts. Its `spec_accept_length` is completion_tokens / spec_verify_ct, where
completion_tokens includes the first token, which the prefill sampled and no round committed; its server-wide
`avg_spec_accept_length` counts whole rounds, also the part of a last round that the stop token or the token
budget cuts off. Ours (train.evaluate.accounting) counts what rounds committed and was kept:

    accept length = sum over requests of (kept tokens - 1) / sum over requests of spec_verify_ct

The histogram proves the reading: with h[a] rounds of a accepted drafts, every round commits a + 1 tokens, so
sum of h = spec_verify_ct, and sum of h[a] (a + 1) - (kept tokens - 1) is what was cut off the last round, 0 .. K.

Per slot, survival comes from the histogram and so counts the last round of a request whole, where ours cuts it;
that is one round a request.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from target_bridge.serving.server import ServedOutput


class AccountingError(RuntimeError):
    """What the server reported does not fit together; the message names the request and both values."""


@dataclass(frozen=True)
class ServedSample:
    """One request, in our definitions.

    Attributes:
        prompt: its id.
        tokens: kept ids: up to and including the first stop token.
        rounds: verification rounds.
        histogram: [K + 1]; rounds that accepted so many drafts, each counted whole.
        finish: "eos" or "length".
        past_stop: tokens the server returned after a stop token, not kept. 0.5.16 looks at the token budget
            before it looks for stop tokens, so a round that passes both keeps all up to the budget; 0.5.23 no
            longer does.
    """

    prompt: str
    tokens: tuple[int, ...]
    rounds: int
    histogram: tuple[int, ...]
    finish: str
    past_stop: int

    @property
    def committed(self) -> int:
        """Tokens that rounds committed and that were kept: all but the prefill's."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class ServedStatistics:
    """Numbers of many requests; None where nothing was observed.

    Attributes:
        rounds, committed, tokens: sums; `tokens` includes the first ones.
        accept_length: committed / rounds: comparable with our evaluator's.
        standard_error: of `accept_length`, over prompts.
        accept_length_whole_rounds: last rounds counted whole, as the server's own average does.
        accept_length_as_reported: tokens / rounds: what meta_info's spec_accept_length averages to.
        survival, conditional: [K], from the histogram.
    """

    rounds: int
    committed: int
    tokens: int
    accept_length: float | None
    standard_error: float | None
    accept_length_whole_rounds: float | None
    accept_length_as_reported: float | None
    survival: tuple[float | None, ...]
    conditional: tuple[float | None, ...]


def read_plain(prompt: str, output: ServedOutput, eos_ids: Collection[int], budget: int) -> ServedSample:
    """A request served without a draft: the same checks on its tokens, no rounds.

    Raises:
        AccountingError: see `read_served`.
    """
    tokens, finish, past_stop = _tokens(prompt, output, eos_ids, budget)
    return ServedSample(prompt, tokens, 0, (), finish, past_stop)


def read_served(
    prompt: str, output: ServedOutput, eos_ids: Collection[int], budget: int, block_size: int
) -> ServedSample:
    """A request served with a draft.

    Args:
        prompt: its id.
        output: the server's answer.
        eos_ids: our stop ids, which the request was given.
        budget: the max_new_tokens it was given.
        block_size: K.

    Raises:
        AccountingError: it was aborted or retracted, stopped at an id that is none of ours, or its counts
            contradict one another or its tokens.
    """
    tokens, finish, past_stop = _tokens(prompt, output, eos_ids, budget)
    meta = output.meta
    rounds = int(meta.get("spec_verify_ct") or 0)
    histogram = _histogram(meta)
    _require(len(histogram) <= block_size + 1, prompt, f"a round accepted {len(histogram) - 1} of {block_size} drafts")
    histogram += [0] * (block_size + 1 - len(histogram))
    _require(sum(histogram) == rounds, prompt, f"{rounds} rounds, the histogram has {sum(histogram)}")
    accepted = sum(count * size for size, count in enumerate(histogram))
    for key in ("spec_num_correct_drafts", "spec_accepted_drafts"):
        if rounds and key in meta:
            _require(meta[key] == accepted, prompt, f"{key} {meta[key]}, the histogram has {accepted}")
    cut = accepted + rounds - (len(tokens) - 1)
    _require(
        0 <= cut <= (block_size if rounds else 0), prompt,
        f"{rounds} rounds that accepted {accepted} drafts commit {accepted + rounds} tokens, but {len(tokens) - 1} "
        f"came after the first: at most {block_size} may be cut off the last round",
    )  # fmt: skip
    reported = meta.get("spec_accept_length")
    if rounds and reported is not None:
        expected = len(output.tokens) / rounds
        _require(
            math.isclose(reported, expected, rel_tol=1e-4), prompt,
            f"spec_accept_length {reported:.4f}, but {len(output.tokens)} tokens / {rounds} rounds is {expected:.4f}: "
            "this SGLang means something else by it",
        )  # fmt: skip
    return ServedSample(prompt, tokens, rounds, tuple(histogram), finish, past_stop)


def served_statistics(samples: Sequence[ServedSample], block_size: int) -> ServedStatistics:
    """Accept length and per-slot acceptance of many requests, weighted by rounds over all of them."""
    rounds = sum(sample.rounds for sample in samples)
    committed = sum(sample.committed for sample in samples if sample.rounds)
    tokens = sum(len(sample.tokens) for sample in samples)
    reported = sum(len(sample.tokens) + sample.past_stop for sample in samples if sample.rounds)
    histogram = [sum(sample.histogram[size] for sample in samples) for size in range(block_size + 1)]
    at_least = [sum(histogram[size:]) for size in range(block_size + 2)]  # [a]: rounds that accepted a or more
    pairs = [(sample.committed, sample.rounds) for sample in samples]
    return ServedStatistics(
        rounds=rounds,
        committed=committed,
        tokens=tokens,
        accept_length=_ratio(committed, rounds),
        standard_error=standard_error(pairs),
        accept_length_whole_rounds=_ratio(sum(at_least[: block_size + 1]), rounds),
        accept_length_as_reported=_ratio(reported, rounds),
        survival=tuple(_ratio(at_least[slot + 1], rounds) for slot in range(block_size)),
        conditional=tuple(_ratio(at_least[slot + 1], at_least[slot]) for slot in range(block_size)),
    )


def standard_error(pairs: Sequence[tuple[int, int]]) -> float | None:
    """Standard error of sum(committed) / sum(rounds), prompts being the independent draws.

    The usual linearised variance of a ratio estimator.

    Args:
        pairs: (committed, rounds) of every prompt; those without rounds do not count.
    """
    counted = [(committed, rounds) for committed, rounds in pairs if rounds]
    if len(counted) < 2:
        return None
    total = sum(rounds for _, rounds in counted)
    ratio = sum(committed for committed, _ in counted) / total
    spread = sum((committed - ratio * rounds) ** 2 for committed, rounds in counted)
    return math.sqrt(spread * len(counted) / (len(counted) - 1)) / total


def _tokens(
    prompt: str, output: ServedOutput, eos_ids: Collection[int], budget: int
) -> tuple[tuple[int, ...], str, int]:
    """(kept tokens, finish, tokens past a stop)."""
    meta, given = output.meta, output.tokens
    reason = meta.get("finish_reason") or {}
    kind, matched = reason.get("type"), reason.get("matched")
    _require(kind in ("stop", "length"), prompt, f"it ended with {reason or 'no finish_reason'}")
    _require(
        kind == "length" or matched in eos_ids, prompt,
        f"it stopped at {matched!r}, which is none of the target's stop ids {sorted(eos_ids)}",
    )  # fmt: skip
    completion = meta.get("completion_tokens")
    _require(completion == len(given), prompt, f"completion_tokens {completion}, but {len(given)} ids came back")
    _require(1 <= len(given) <= budget, prompt, f"{len(given)} tokens came back, {budget} were allowed")
    _require(
        kind == "stop" or len(given) == budget, prompt, f"it ended by length after {len(given)} of {budget} tokens"
    )
    retractions = meta.get("num_retractions") or 0
    _require(not retractions, prompt, f"it was retracted {retractions} time(s); lower --concurrency")
    end = next((index for index, token in enumerate(given) if token in eos_ids), None)
    if end is None:
        _require(kind == "length", prompt, "it stopped, but holds no stop id")
        return tuple(given), "length", 0
    return tuple(given[: end + 1]), "eos", len(given) - end - 1


def _histogram(meta: dict[str, Any]) -> list[int]:
    for key in ("spec_correct_drafts_histogram", "spec_accept_histogram"):
        if meta.get(key) is not None:
            return [int(count) for count in meta[key]]
    return []


def _require(holds: bool, prompt: str, what: str) -> None:
    if not holds:
        raise AccountingError(f"the server's answer to prompt {prompt!r} cannot be counted: {what}")


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None
