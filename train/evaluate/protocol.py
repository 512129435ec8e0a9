"""Draft and verify, prompt by prompt: exact rejection sampling, cached on both sides (dspark_spec 5.1).

Differences from the evaluator described there, each the repair of a defect (dspark_spec 8.2): the draft's
tokens are drawn from the very fp32 distribution the acceptance ratio uses; a round is counted only as far as
its tokens are kept; a prompt's randomness depends on the seed and its own id alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from draft_jax.batch import FrozenHead
from draft_jax.config import DraftConfig
from target_bridge import handoff
from train.evaluate.accounting import Round, accept_statistics
from train.evaluate.config import EvalConfig
from train.evaluate.decoding import decode_with_draft, sample_generator
from train.evaluate.draft_runner import DraftRunner
from train.evaluate.identity import prompts_digest
from train.evaluate.plain import plain_decode
from train.evaluate.result import Difference, EvalResult, Refusal, SampleResult
from train.evaluate.tasks import Prompt

if TYPE_CHECKING:
    from target_bridge.target import Target, TargetInfo

#: The draft's cache is a multiple of this long, so that evaluations of similar prompts share their programs.
CONTEXT_STEP = 128
#: Called after every prompt with (prompts done, prompts in all, accept length so far or None).
Progress = Callable[[int, int, float | None], None]


class MismatchError(ValueError):
    """Draft and target do not belong together; the message names both values."""


def evaluate(
    target: Target,
    config: DraftConfig,
    params: Any | None,
    frozen: FrozenHead | None,
    prompts: Sequence[Prompt],
    eval_config: EvalConfig,
    progress: Progress | None = None,
) -> EvalResult:
    """Measures what a draft saves its target, on prompts.

    Args:
        target: opened with the draft's taps.
        config: the draft.
        params: its parameters; None = a freshly initialised draft (key: `eval_config.seed`), the untrained
            baseline.
        frozen: the target's embedding and head for the draft; None = taken from the target.
        prompts: with unique ids. Their order changes nothing but the order of the results.
        eval_config: temperature, lengths, seed, dtype.
        progress: see `Progress`.

    Raises:
        MismatchError: draft and target differ in hidden size, vocabulary, depth or taps.
        ValueError: two prompts share an id, or a confidence threshold is set for a draft without that head.
        ProposalError: the draft's probabilities are not finite.
    """
    check_match(target.info, config)
    if eval_config.confidence_threshold > 0 and not config.enable_confidence_head:
        raise ValueError(
            f"eval.confidence_threshold is {eval_config.confidence_threshold}, but this draft has no confidence head"
        )
    admitted, refusals = admit(prompts, target.info, config, eval_config)
    if params is None:
        params = _untrained(config, eval_config.seed)
    embedding, head = target.frozen_head()
    if frozen is None:
        frozen = handoff.frozen_to_jax(embedding, head)
    samples: list[SampleResult] = []
    differences: list[Difference] = []
    compiled: dict[str, int] = {}
    dtype = resolve_dtype(eval_config, target.info)
    if admitted:
        longest = max(len(prompt.input_ids) + budget for prompt, budget in admitted)
        longest += -longest % CONTEXT_STEP
        runner = DraftRunner(config, params, frozen, max_context=longest, dtype=dtype, device=embedding.device)
        compiled["before"] = runner.compile_count
        _warm_up(target, runner, admitted[0][0], eval_config)
        for prompt, budget in admitted:
            decoded = decode_with_draft(target, runner, prompt, budget, eval_config)
            if eval_config.plain:
                difference = _decode_plain(target, prompt, budget, eval_config, decoded)
                if difference is not None:
                    differences.append(difference)
            samples.append(decoded)
            if progress is not None:
                so_far = accept_statistics(_rounds(samples), config.block_size)
                progress(len(samples), len(admitted), so_far.accept_length)
        compiled["after"] = runner.compile_count
    result = EvalResult(
        statistics=accept_statistics(_rounds(samples), config.block_size),
        samples=samples,
        refusals=refusals,
        differences=differences,
        settings=_settings(target.info, config, eval_config, dtype, admitted),
        compiled=compiled,
    )
    result.error = _error(result)
    return result


def check_match(info: TargetInfo, config: DraftConfig) -> None:
    """Raises MismatchError unless the draft was made for a target of these sizes and taps."""
    for what, ours, theirs in (
        ("hidden_size", config.hidden_size, info.hidden_size),
        ("vocab_size", config.vocab_size, info.vocab_size),
        ("layers of the target", config.num_target_layers, info.num_layers),
        ("tapped layers", tuple(config.target_layer_ids), tuple(info.layer_ids)),
    ):
        if ours != theirs:
            raise MismatchError(
                f"{what}: the draft was made for {ours}, target {info.name} has {theirs}. "
                "Give the target this draft was trained with"
            )


def admit(
    prompts: Sequence[Prompt], info: TargetInfo, config: DraftConfig, eval_config: EvalConfig
) -> tuple[list[tuple[Prompt, int]], list[Refusal]]:
    """Sorts prompts into those that can be decoded, with how many tokens each may generate, and refusals.

    Raises:
        ValueError: two prompts share an id.
    """
    limit = context_limit(info, config, eval_config)
    admitted: list[tuple[Prompt, int]] = []
    refusals: list[Refusal] = []
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(f"two prompts have the id {prompt.id!r}; ids must be unique, randomness hangs on them")
        seen.add(prompt.id)
        ids = np.asarray(prompt.input_ids)
        if ids.size == 0:
            refusals.append(Refusal(prompt.id, "empty prompt"))
        elif ids.min() < 0 or ids.max() >= info.vocab_size:
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            refusals.append(Refusal(prompt.id, f"id beyond the vocabulary: {wrong} of {info.vocab_size}"))
        elif ids.size + 1 > limit:
            refusals.append(Refusal(prompt.id, f"prompt longer than the context: {ids.size} of {limit} tokens"))
        else:
            admitted.append((prompt, min(eval_config.max_new_tokens, limit - ids.size)))
    return admitted, refusals


def context_limit(info: TargetInfo, config: DraftConfig, eval_config: EvalConfig) -> int:
    """Most tokens a prompt and its output may have together: what target, draft and the caller allow."""
    return min(info.max_length, config.max_position_embeddings, eval_config.max_context or info.max_length)


def resolve_dtype(eval_config: EvalConfig, info: TargetInfo) -> str:
    """The draft's compute dtype: as asked, else the target's."""
    if eval_config.dtype != "auto":
        return eval_config.dtype
    return "float32" if info.dtype == "float32" else "bfloat16"


def _decode_plain(
    target: Target, prompt: Prompt, max_new_tokens: int, eval_config: EvalConfig, result: SampleResult
) -> Difference | None:
    """Adds plain decoding to `result`; at temperature 0, tells where the two outputs part."""
    temperature = 0.0 if eval_config.greedy else eval_config.temperature
    uniforms = sample_generator(eval_config.seed, prompt.id, "plain").random(max_new_tokens, dtype=np.float32)
    plain = plain_decode(target, prompt.input_ids, max_new_tokens, temperature, uniforms)
    result.plain_tokens, result.plain_seconds = plain.tokens, plain.seconds
    ours = result.output_tokens
    if not eval_config.greedy or ours == plain.tokens:
        return None
    position = next(
        (i for i, (a, b) in enumerate(zip(ours, plain.tokens)) if a != b), min(len(ours), len(plain.tokens))
    )

    def at(tokens: list[Any]) -> Any:
        return tokens[position] if position < len(tokens) else None

    return Difference(prompt.id, position, at(ours), at(plain.tokens), at(plain.margins))


def _warm_up(target: Target, runner: DraftRunner, prompt: Prompt, eval_config: EvalConfig) -> None:
    """Runs one round that is not counted, so that no first-call cost lands in the timings."""
    shortest = Prompt(prompt.id, prompt.input_ids[-1:], "")
    decode_with_draft(target, runner, shortest, 3, eval_config, stop_after=1)


def _untrained(config: DraftConfig, seed: int) -> Any:
    import jax

    from draft_jax.models.dspark import init_params

    return init_params(config, jax.random.key(seed % 2**32))


def _rounds(samples: Sequence[SampleResult]) -> list[Round]:
    return [item for result in samples for item in result.rounds]


def _settings(
    info: TargetInfo,
    config: DraftConfig,
    eval_config: EvalConfig,
    dtype: str,
    admitted: Sequence[tuple[Prompt, int]],
) -> dict[str, Any]:
    return {
        "target": info.name,
        "target_dtype": info.dtype,
        "draft_dtype": dtype,
        "block_size": config.block_size,
        "temperature": eval_config.temperature,
        "greedy": eval_config.greedy,
        "confidence_threshold": eval_config.confidence_threshold,
        "max_new_tokens": eval_config.max_new_tokens,
        "seed": eval_config.seed,
        "eos_token_ids": list(info.eos_token_ids),
        "context_limit": context_limit(info, config, eval_config),
        "prompts_digest": prompts_digest((prompt.id, prompt.input_ids, budget) for prompt, budget in admitted),
        "shortened_to_context": sum(budget < eval_config.max_new_tokens for _, budget in admitted),
    }


def _error(result: EvalResult) -> str | None:
    """Why the numbers are no measurement, if they are none: an accept length of 1.00 would look like one."""
    if not result.samples:
        return "no prompt was evaluated" + (f" ({len(result.refusals)} refused)" if result.refusals else "")
    if not result.rounds:
        return "no round was run: every output ended with its first token (max_new_tokens 1, or a stop token)"
    if not result.statistics.proposed:
        return f"the draft proposed nothing in {result.rounds} rounds: this is plain decoding, not a measurement"
    return None
