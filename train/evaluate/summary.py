"""From decodings to the result of an evaluation, complete or so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draft_jax.config import DraftConfig
from train.evaluate.accounting import accept_statistics
from train.evaluate.passes import Passes
from train.evaluate.plain import PlainOutput
from train.evaluate.result import Difference, EvalResult, Refusal
from train.evaluate.sample_result import SampleResult


def summarise(
    config: DraftConfig, passes: Passes, settings: dict[str, Any], refusals: Sequence[Refusal], expected: Sequence[str]
) -> EvalResult:
    """The result of what has been decoded.

    Args:
        config: the draft.
        passes: the decodings.
        settings: what they were made with.
        refusals: prompts that are not decoded.
        expected: ids of all prompts that are, in the order of the result.
    """
    samples = [passes.drafted[name] for name in expected if name in passes.drafted]
    differences = []
    for sample in samples:
        plain = passes.plain.get(sample.prompt)
        if plain is not None:
            sample.plain_tokens, sample.plain_seconds = plain.tokens, plain.seconds
            if settings["greedy"] and (difference := _difference(sample, plain)) is not None:
                differences.append(difference)
    result = EvalResult(
        statistics=accept_statistics([item for sample in samples for item in sample.rounds], config.block_size),
        samples=samples,
        refusals=list(refusals),
        differences=differences,
        settings=dict(settings),
        compiled=dict(passes.compiled),
        missing=sum(not passes.complete(name) for name in expected),
    )
    result.error = _error(result)
    return result


def _difference(sample: SampleResult, plain: PlainOutput) -> Difference | None:
    """Where an output first leaves plain greedy decoding."""
    ours = sample.output_tokens
    if ours == plain.tokens:
        return None
    shorter = min(len(ours), len(plain.tokens))
    position = next((i for i in range(shorter) if ours[i] != plain.tokens[i]), shorter)

    def at(values: Sequence[Any]) -> Any:
        return values[position] if position < len(values) else None

    return Difference(sample.prompt, position, at(ours), at(plain.tokens), at(plain.margins))


def _error(result: EvalResult) -> str | None:
    """Why the numbers are no measurement, if they are none: an accept length of 1.00 would look like one."""
    if not result.samples:
        return "no prompt was evaluated" + (f" ({len(result.refusals)} refused)" if result.refusals else "")
    if not result.rounds:
        return "no round was run: every output ended with its first token (max_new_tokens 1, or a stop token)"
    if not result.statistics.proposed:
        return f"the draft proposed nothing in {result.rounds} rounds: this is plain decoding, not a measurement"
    return None
