"""Putting a run together: target, data, mesh, compiled programs. Everything that is made once."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from .distributed import World
from .feeding import Feeder
from .optimizer import make_optimizer, make_schedule
from .plan import parameter_groups
from .resolve import (
    check_division,
    placement_of,
    read_target_config,
    resolve_attention,
    resolve_draft,
    resolve_dtype,
    resolve_steps,
)
from .resume import run_identity
from .sharding import RowShare, head_sharding, make_mesh, row_share
from .state import Params, TrainState, abstract_state, at_step, new_state
from .step import Programs, StepOptions, compile_programs
from .topology import Topology

if TYPE_CHECKING:
    import torch


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
        initial_state: makes the state of step 0, from given parameters, those of `draft.init_draft` or random ones.
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
    initial_state: Callable[..., TrainState]
    feeder: Callable[[], Feeder]


def assemble(
    config: RunConfig,
    target: Target | None = None,
    check: Callable[[dict[str, Any]], None] = lambda identity: None,
    world: World | None = None,
) -> Assembled:
    """Load, resolve and compile.

    Args:
        config: the run.
        target: a loaded target instead of `config.target`.
        check: called with the run's identity before anything is compiled; may refuse it.
        world: the processes of the run; None = this one alone. What fails on one is raised by all.
    """
    world = world or World(Topology())
    platform, devices = runtime.start_jax(config, world)
    check_division(config, len(devices))
    _share(config, world)  # refuses a group of `seq` devices that begins inside a process
    target_config = world.attempt("reading the target's config", lambda: read_target_config(config.target))
    draft = world.attempt("resolving the draft", lambda: resolve_draft(config, target_config))
    dtype = resolve_dtype(config.train.dtype, platform)
    given, target_dtype = target, resolve_dtype(config.target.dtype, platform)
    target = world.attempt(
        "loading the target",
        lambda: given or runtime.load_target(config, draft.target_layer_ids, platform, target_dtype, world.topology),
    )
    _check_target(config, draft, target.info)
    # Random weights say nothing: dummy ones are so small that all layers look alike.
    if config.target.bridge == "sglang" and config.target.probe and config.target.sglang.load_format != "dummy":
        probe.require(target, config, target_config)
    # Rows of ids need no tokenizer, and a target of random weights may have none.
    tokenizer = None if config.data.format == "tokens" else target.tokenizer
    vocab_size = target.info.vocab_size
    data = world.attempt("reading the data", lambda: load_dataset(config.data, tokenizer, vocab_size))
    say = print if world.is_first else _silent
    say(data.summary.format(), flush=True)
    train = config.train
    rows = _rows(config, data, world, say)
    total_steps = resolve_steps(train, rows.rows_per_epoch)
    stream = {name: value for name, value in rows.get_state().items() if name != "next_batch"}
    identity = run_identity(config, draft, stream)
    world.agree("the draft and the data", identity)
    world.attempt("comparing with the checkpoint", lambda: check(identity))
    mesh = make_mesh(devices, train.fsdp, train.seq)
    placement = placement_of(config)
    embedding, head = target.frozen_head()
    world.agree("the target's weights", {"embedding": _sample(embedding), "head": _sample(head)})
    frozen = handoff.frozen_to_jax(embedding, head, head_sharding(mesh, placement))
    options = StepOptions(
        draft=draft,
        objective=config.objective,
        optimizer=make_optimizer(config.optimizer),
        schedule=make_schedule(config.optimizer, total_steps),
        dtype=jnp.dtype(dtype),
        attention=resolve_attention(train.attention, platform, devices[0].device_kind, dtype, draft.head_dim),
        placement=placement,
        rematerialise=train.rematerialise,
    )
    programs = compile_programs(
        options,
        mesh,
        rows=train.batch_rows,
        length=config.data.row_tokens,
        frozen=frozen,
        hidden_dtype=jnp.dtype(target.info.dtype),
        agree=world.agree,
    )
    say(_describe(draft, programs, total_steps, platform, dtype, options.attention, len(devices)), flush=True)

    def initial_state(params: Params | None = None) -> TrainState:
        if params is not None or config.draft.init_draft is None:
            return new_state(draft, options.optimizer, train.seed, mesh, params, placement)
        from draft_jax.weights import load_folder

        _, params, _ = load_folder(Path(config.draft.init_draft))
        state = new_state(draft, options.optimizer, train.seed, mesh, params, placement)
        return at_step(state, rewarm_from=0)

    def feeder() -> Feeder:
        share = _share(config, world)
        ring = _ring(config, draft, target, share)
        return Feeder(
            rows,
            _cached(config, target),
            ring,
            mesh,
            sanitize=config.objective.sanitize,
            first_token=share.part * (config.data.row_tokens // share.parts),
            **({"attempt": world.attempt} if coupled(config) else {}),
        )

    return Assembled(
        draft=draft,
        target=target,
        rows=rows,
        frozen=frozen,
        programs=programs,
        total_steps=total_steps,
        identity=identity,
        abstract_state=abstract_state(draft, options.optimizer, mesh, placement),
        initial_state=initial_state,
        feeder=feeder,
    )


def coupled(config: RunConfig) -> bool:
    """Whether the micro-steps of several processes exchange numbers; otherwise only their optimizer steps do."""
    return max(config.train.fsdp, config.train.seq) > 1 or config.objective.normalization == "micro_step"


def _share(config: RunConfig, world: World) -> RowShare:
    return row_share(world.rank, world.size, config.train.devices, config.train.seq)


def _silent(*text: str, flush: bool = False) -> None:
    """Printing, on all processes but the first."""


def _sample(weights: "torch.Tensor") -> str:
    """Checksum of some values spread over a matrix: two revisions of a model differ in nearly all."""
    flat = weights.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // 2**16)].float().cpu().numpy()
    return f"{list(weights.shape)} {zlib.crc32(some.tobytes()):08x}"


def _describe(
    draft: DraftConfig, programs: Programs, total_steps: int, platform: str, dtype: str, attention: str, devices: int
) -> str:
    parameters = sum(parameter_groups(draft).values())
    temporary = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in programs.memory().items())
    return (
        f"{parameters:,} trainable parameters, {total_steps} optimizer steps, {dtype} on {devices} {platform}"
        f"{' devices' if devices > 1 else ''}, attention {attention};"
        f" programs compiled in {programs.compile_seconds:.1f} s,"
        f" their temporary memory: {temporary or 'not known'}"
    )


def _rows(config: RunConfig, data: PreparedData, world: World, say: Callable[..., None]) -> RowIterator:
    """The stream of rows, one conversation each or packed."""
    share = _share(config, world)
    packed = None
    if config.data.packing == "first_fit":
        packing = pack(
            data.samples,
            config.data.row_tokens,
            seed=config.data.seed,
            num_anchors=config.objective.num_anchors,
            per_document=config.objective.anchors_per_document,
        )
        say(packing.describe(), flush=True)
        packed = packing.rows
    return RowIterator(
        data.samples,
        config.train.batch_rows,
        config.data.row_tokens,
        seed=config.data.seed,
        shuffle=config.data.shuffle,
        packed=packed,
        share=(share.index, share.count),
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


def _ring(config: RunConfig, draft: DraftConfig, target: Target, share: RowShare) -> StagingRing:
    embedding, _ = target.frozen_head()
    return StagingRing(
        1,  # target and draft take turns: strict fences leave nothing for a second slot to do
        config.train.batch_rows // share.count,
        config.data.row_tokens // share.parts,
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
