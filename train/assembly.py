"""Putting a run together: target, data, mesh, compiled programs. Everything that is made once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from draft_jax.batch import FrozenHead
from draft_jax.config import DraftConfig
from target_bridge import handoff
from target_bridge.staging import StagingRing
from target_bridge.target import Target, TargetInfo

from . import probe, runtime
from .config import ConfigError, RunConfig
from .data.packing import pack
from .data.pipeline import PreparedData, load_dataset
from .data.rows import RowIterator
from .feeding import Feeder
from .optimizer import make_optimizer, make_schedule
from .plan import parameter_groups
from .resolve import read_target_config, resolve_attention, resolve_draft, resolve_dtype, resolve_steps
from .resume import run_identity
from .sharding import make_mesh, replicated
from .state import TrainState, abstract_state, new_state
from .step import Programs, StepOptions, compile_programs


@dataclass(frozen=True)
class Assembled:
    """The parts of a run before its first step.

    Attributes:
        draft: the draft's configuration.
        target: the loaded target.
        rows: the stream of rows, at its start.
        frozen: the target's embedding and head as JAX arrays.
        programs: compiled.
        total_steps: optimizer steps of the whole run.
        identity: the facts a resumed run must share.
        abstract_state: shapes, dtypes and shardings of the state.
        initial_state: makes the state of step 0.
        feeder: makes the feeder, once `rows` stands at its position.
    """

    draft: DraftConfig
    target: Target
    rows: RowIterator
    frozen: FrozenHead
    programs: Programs
    total_steps: int
    identity: dict[str, Any]
    abstract_state: TrainState
    initial_state: Callable[[], TrainState]
    feeder: Callable[[], Feeder]


def assemble(
    config: RunConfig,
    target: Target | None = None,
    check: Callable[[dict[str, Any]], None] = lambda identity: None,
) -> Assembled:
    """Load, resolve and compile.

    Args:
        config: the run.
        target: a loaded target instead of `config.target`.
        check: called with the run's identity before anything is compiled; may refuse it.
    """
    platform, devices = runtime.start_jax(config)
    target_config = read_target_config(config.target)
    draft = resolve_draft(config, target_config)
    dtype = resolve_dtype(config.train.dtype, platform)
    if target is None:
        target = runtime.load_target(
            config, draft.target_layer_ids, platform, resolve_dtype(config.target.dtype, platform)
        )
    _check_target(config, draft, target.info)
    # Random weights say nothing: dummy ones are so small that all layers look alike.
    if config.target.bridge == "sglang" and config.target.probe and config.target.sglang.load_format != "dummy":
        probe.require(target, config, target_config)
    # Rows of ids need no tokenizer, and a target of random weights may have none.
    tokenizer = None if config.data.format == "tokens" else target.tokenizer
    data = load_dataset(config.data, tokenizer, target.info.vocab_size)
    print(data.summary.format(), flush=True)
    train = config.train
    rows = _rows(config, data)
    total_steps = resolve_steps(train, rows.rows_per_epoch)
    stream = {name: value for name, value in rows.get_state().items() if name != "next_batch"}
    identity = run_identity(config, draft, stream)
    check(identity)
    mesh = make_mesh(devices, train.fsdp)
    embedding, head = target.frozen_head()
    frozen = handoff.frozen_to_jax(embedding, head, replicated(mesh))
    options = StepOptions(
        draft=draft,
        objective=config.objective,
        optimizer=make_optimizer(config.optimizer),
        schedule=make_schedule(config.optimizer, total_steps),
        dtype=jnp.dtype(dtype),
        attention=resolve_attention(train.attention, platform, devices[0].device_kind, dtype, draft.head_dim),
    )
    programs = compile_programs(
        options,
        mesh,
        rows=train.batch_rows,
        length=config.data.row_tokens,
        frozen=frozen,
        hidden_dtype=jnp.dtype(target.info.dtype),
    )
    _describe(draft, programs, total_steps, platform, dtype, options.attention)

    def initial_state() -> TrainState:
        params = None
        if config.draft.init_draft is not None:
            from draft_jax.weights import load_folder

            _, params, _ = load_folder(Path(config.draft.init_draft))
        return new_state(draft, options.optimizer, train.seed, mesh, params)

    def feeder() -> Feeder:
        ring = _ring(config, draft, target)
        return Feeder(rows, _cached(config, target), ring, mesh, sanitize=config.objective.sanitize)

    return Assembled(
        draft=draft,
        target=target,
        rows=rows,
        frozen=frozen,
        programs=programs,
        total_steps=total_steps,
        identity=identity,
        abstract_state=abstract_state(draft, options.optimizer, mesh),
        initial_state=initial_state,
        feeder=feeder,
    )


def _describe(
    draft: DraftConfig, programs: Programs, total_steps: int, platform: str, dtype: str, attention: str
) -> None:
    parameters = sum(parameter_groups(draft).values())
    temporary = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in programs.memory().items())
    print(
        f"{parameters:,} trainable parameters, {total_steps} optimizer steps, {dtype} on {platform},"
        f" attention {attention};"
        f" programs compiled in {programs.compile_seconds:.1f} s,"
        f" their temporary memory: {temporary or 'not known'}",
        flush=True,
    )


def _rows(config: RunConfig, data: PreparedData) -> RowIterator:
    """The stream of rows, one conversation each or packed."""
    packed = None
    if config.data.packing == "first_fit":
        packing = pack(
            data.samples,
            config.data.row_tokens,
            seed=config.data.seed,
            num_anchors=config.objective.num_anchors,
            per_document=config.objective.anchors_per_document,
        )
        print(packing.describe(), flush=True)
        packed = packing.rows
    return RowIterator(
        data.samples,
        config.train.batch_rows,
        config.data.row_tokens,
        seed=config.data.seed,
        shuffle=config.data.shuffle,
        packed=packed,
    )


def _check_target(config: RunConfig, draft: DraftConfig, info: TargetInfo) -> None:
    if config.data.max_length > info.max_length:
        raise ConfigError(
            f"data.max_length is {config.data.max_length}; target {info.name} takes at most {info.max_length} tokens"
        )
    for name, ours, theirs in (
        ("hidden size", draft.hidden_size, info.hidden_size),
        ("layers", draft.num_target_layers, info.num_layers),
        ("vocabulary", draft.vocab_size, info.vocab_size),
        ("tapped layers", draft.target_layer_ids, tuple(info.layer_ids)),
    ):
        if ours != theirs:
            raise ConfigError(f"target {info.name}: {name} {theirs}, but the draft is made for {ours}")


def _ring(config: RunConfig, draft: DraftConfig, target: Target) -> StagingRing:
    embedding, _ = target.frozen_head()
    return StagingRing(
        1,  # target and draft take turns: strict fences leave nothing for a second slot to do
        config.train.batch_rows,
        config.data.row_tokens,
        draft.num_taps * draft.hidden_size,
        draft.hidden_size,
        dtype=embedding.dtype,
        device=embedding.device,
    )


def _cached(config: RunConfig, target: Target) -> Target:
    if config.target.capture_cache_gib <= 0:
        return target
    from target_bridge.cache import CaptureCache

    return CaptureCache(target, int(config.target.capture_cache_gib * 2**30))
