"""Draft and verify, many prompts at a time: exact rejection sampling, cached on both sides (dspark_spec 5.1).

Differences from the evaluator described there, each the repair of a defect (dspark_spec 8.2): the draft's
tokens are drawn from the very fp32 distribution the acceptance ratio uses; a round is counted only as far as
its tokens are kept; a prompt's randomness depends on the seed and its own id alone. DeepSpec's own ways can be asked
for (`EvalConfig.draft_sampling`, `count_overshoot`, `seed_by`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from draft_jax.batch import FrozenHead
from draft_jax.config import DraftConfig
from train.evaluate.config import EvalConfig
from train.evaluate.identity import prompts_digest
from train.evaluate.journal import Journal
from train.evaluate.passes import Passes
from train.evaluate.result import EvalResult, Refusal
from train.evaluate.roster import Job
from train.evaluate.summary import summarise
from train.evaluate.tasks import Prompt, PromptSet

if TYPE_CHECKING:
    from target_bridge.target import Target, TargetInfo

#: Called after every decoding with (decodings done, decodings in all, accept length so far or None); plain ones count.
Progress = Callable[[int, int, float | None], None]
#: Prompts decoded side by side, by the device of the target: where a forward costs little more than one of a few texts.
BATCH = {"cpu": 16, "cuda": 48}


class MismatchError(ValueError):
    """Draft and target do not belong together; the message names both values."""


def evaluate(
    target: Target,
    config: DraftConfig,
    params: Any | None,
    frozen: FrozenHead | None,
    prompts: Sequence[Prompt] | PromptSet,
    eval_config: EvalConfig,
    progress: Progress | None = None,
    *,
    journal: Callable[[dict[str, Any]], Journal] | None = None,
    share: tuple[int, int] = (0, 1),
    partial: Callable[[EvalResult], None] | None = None,
    all_turns: bool = False,
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
        journal: opens the rows on disk, given the settings they depend on; None = nothing is written.
        share: (i, n): decode only the prompts i, i + n, i + 2n, ... The result holds what the journal has besides.
        partial: told the result so far after each task.
        all_turns: ask the later user turns of `prompts` too, which must then be a `PromptSet`, each after the answer
            its conversation got.

    Raises:
        MismatchError: draft and target differ in hidden size, vocabulary, depth or taps.
        ValueError: two prompts share an id, a confidence threshold is set for a draft without that head, or the
            journal is another evaluation's.
        ProposalError: the draft's probabilities are not finite.
    """
    check_match(target.info, config)
    if eval_config.confidence_threshold > 0 and not config.enable_confidence_head:
        raise ValueError(
            f"eval.confidence_threshold is {eval_config.confidence_threshold}, but this draft has no confidence head"
        )
    asked = prompts.prompts if isinstance(prompts, PromptSet) else list(prompts)
    jobs, refusals = admit(asked, target.info, config, eval_config)
    settings = _settings(target.info, config, eval_config, jobs)
    rows = journal(dict(settings)) if journal is not None else None
    batch, dtype = resolve_batch(eval_config, target), resolve_dtype(eval_config, target.info)
    settings |= {"batch_size": batch, "platform": target.frozen_head()[0].device.type}
    passes = Passes(target, config, params, frozen, eval_config, dtype, batch, rows, progress)
    expected = [job.prompt.id for job in jobs]

    def so_far() -> EvalResult:
        return summarise(config, passes, settings, refusals, expected)

    try:
        mine = jobs[share[0] :: share[1]]
        passes.expect(mine)
        for task in dict.fromkeys(job.prompt.task for job in mine):
            turn = [job for job in mine if job.prompt.task == task]
            while turn:
                passes.run(turn)
                later = _next_turn(prompts, turn, passes) if all_turns else []
                turn, refused = admit(later, target.info, config, eval_config)
                refusals.extend(refused)
                passes.expect(turn)
                expected.extend(job.prompt.id for job in turn)
            if partial is not None:
                partial(so_far())
        result = so_far()
        if rows is not None and not result.missing:
            rows.finish()
        return result
    finally:
        if rows is not None:
            rows.close()


def _next_turn(prompts: Sequence[Prompt] | PromptSet, turn: Sequence[Job], passes: Passes) -> list[Prompt]:
    if not isinstance(prompts, PromptSet) or prompts.tokenizer is None:
        raise ValueError("later turns can only be asked of prompts loaded from a file (load_prompts)")
    asked = PromptSet([job.prompt for job in turn], render=prompts.render, tokenizer=prompts.tokenizer)
    answers = {
        job.prompt.id: prompts.tokenizer.decode(passes.drafted[job.prompt.id].output_tokens, skip_special_tokens=True)
        for job in turn
    }
    return asked.next_turn(answers).prompts


def resolve_batch(eval_config: EvalConfig, target: Target) -> int:
    """Prompts side by side: as asked, else by the target's device."""
    if eval_config.batch_size is not None:
        return eval_config.batch_size
    embedding, _ = target.frozen_head()
    return BATCH["cpu" if embedding.device.type == "cpu" else "cuda"]


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
) -> tuple[list[Job], list[Refusal]]:
    """Sorts prompts into those that can be decoded, with how many tokens each may generate, and refusals.

    Raises:
        ValueError: two prompts share an id.
    """
    limit = context_limit(info, config, eval_config)
    admitted: list[Job] = []
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
            admitted.append(Job(prompt, min(eval_config.max_new_tokens, limit - ids.size)))
    return admitted, refusals


def context_limit(info: TargetInfo, config: DraftConfig, eval_config: EvalConfig) -> int:
    """Most tokens a prompt and its output may have together: what target, draft and the caller allow."""
    room = config.block_size + 1 if eval_config.count_overshoot else 0
    limit = min(info.max_length, config.max_position_embeddings) - room
    return min(limit, eval_config.max_context or limit)


def resolve_dtype(eval_config: EvalConfig, info: TargetInfo) -> str:
    """The draft's compute dtype: as asked, else the target's."""
    if eval_config.dtype != "auto":
        return eval_config.dtype
    return "float32" if info.dtype == "float32" else "bfloat16"


def _settings(
    info: TargetInfo,
    config: DraftConfig,
    eval_config: EvalConfig,
    jobs: Sequence[Job],
) -> dict[str, Any]:
    return {
        "target": info.name,
        "target_dtype": info.dtype,
        "draft_dtype": resolve_dtype(eval_config, info),
        "block_size": config.block_size,
        "temperature": eval_config.temperature,
        "greedy": eval_config.greedy,
        "confidence_threshold": eval_config.confidence_threshold,
        "max_new_tokens": eval_config.max_new_tokens,
        "seed": eval_config.seed,
        "seed_by": eval_config.seed_by,
        "draft_sampling": eval_config.draft_sampling,
        "count_overshoot": eval_config.count_overshoot,
        "eos_token_ids": list(info.eos_token_ids),
        "context_limit": context_limit(info, config, eval_config),
        "prompts_digest": prompts_digest((job.prompt.id, job.prompt.input_ids, job.max_new_tokens) for job in jobs),
        "shortened_to_context": sum(job.max_new_tokens < eval_config.max_new_tokens for job in jobs),
    }
