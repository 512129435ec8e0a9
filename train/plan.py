"""`--plan`: what a run would be, computed from the target's config.json alone: no weights, no data, no device."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import AbstractMesh

from draft_jax.config import DraftConfig
from draft_jax.cost import Shape, layer_parameters, step_flops, step_memory
from draft_jax.models.dspark import abstract_params
from draft_jax.objective.config import target_sizes_for

from .config import RunConfig
from .config_file import dump
from .resolve import (
    check_division,
    placement_of,
    read_target_config,
    resolve_attention,
    resolve_draft,
    resolve_dtype,
)
from .sharding import AXES, path_of, place, split_of, splits

_BYTES = {"float32": 4, "bfloat16": 2}
#: Slots of the staging ring: target and draft take turns, so one is enough.
STAGING_SLOTS = 1


@dataclass(frozen=True)
class Plan:
    """Estimates of a run; all sizes in bytes and per device, all operations per optimizer step.

    Attributes:
        draft: the draft's configuration.
        platform: cpu, gpu or tpu: decides `auto` precisions.
        dtype: compute dtype.
        parameters: trainable parameters by group.
        memory: bytes by purpose.
        flops: floating-point operations (a multiply-add is 2) of one optimizer step by part, over all devices.
        chunk: rows of vocabulary logits that exist at once.
        devices: of all processes.
        state: lines that say over which mesh the state is split, and what of it is not.
    """

    draft: DraftConfig
    platform: str
    dtype: str
    parameters: dict[str, int]
    memory: dict[str, int]
    flops: dict[str, float]
    chunk: int
    devices: int
    state: list[str]


def parameter_groups(draft: DraftConfig) -> dict[str, int]:
    """Trainable parameters by group, from the tensor shapes of the export."""
    counts: Counter[str] = Counter()
    for name, shape in draft.parameter_shapes().items():
        size = 1
        for extent in shape:
            size *= extent
        group = "norms" if "norm" in name else name.split(".")[0].removesuffix("_head")
        counts[group] += size
    return dict(counts)


def make_plan(config: RunConfig, platform: str, processes: int = 1) -> Plan:
    """Resolve the draft and estimate memory and operations.

    Args:
        config: the run.
        platform: where it would run: cpu, gpu or tpu.
        processes: how many, of `train.devices` devices each.

    Raises:
        ConfigError: a configuration so many processes cannot run.
    """
    devices = processes * config.train.devices
    check_division(config, devices)
    target_config = read_target_config(config.target)
    draft = resolve_draft(config, target_config)
    dtype = resolve_dtype(config.train.dtype, platform)
    shape = _shape(config, dtype, platform, devices)
    state = _State.of(config, draft, devices)
    return Plan(
        draft=draft,
        platform=platform,
        dtype=dtype,
        parameters=parameter_groups(draft),
        memory=_memory(config, draft, target_config, shape, dtype, _attention(config, platform, dtype, draft), state),
        flops=_flops(config, draft, shape, devices),
        chunk=shape.chunk(draft),
        devices=devices,
        state=state.lines,
    )


@dataclass(frozen=True)
class _State:
    """The training state on one device: bytes, and how it is split in words."""

    parameters: int
    moments: int
    accumulator: int
    mode: str
    lines: list[str]

    @classmethod
    def of(cls, config: RunConfig, draft: DraftConfig, devices: int) -> "_State":
        train = config.train
        sizes = (devices // (train.fsdp * train.seq), train.fsdp, train.seq)
        mesh = AbstractMesh(sizes, AXES)
        placement = placement_of(config)
        params = abstract_params(draft)
        placed = jax.tree.leaves(place(params, mesh, placement))  # type: ignore[arg-type]
        paths, leaves = zip(*((path_of(p), leaf) for p, leaf in jax.tree_util.tree_leaves_with_path(params)))

        def held(spec_of: str) -> int:
            split = [split_of(getattr(at, spec_of))[1] for at in placed]
            return sum(leaf.size // math.prod(mesh.shape[a] for a in axes) for leaf, axes in zip(leaves, split))

        mode = placement.mode_on(mesh)  # type: ignore[arg-type]
        lines = [f"state: {mode}; mesh " + " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes))]
        if mode != "replicated":
            parts = devices if mode == "sharded_moments" else train.fsdp
            whole = [(path, leaf) for path, leaf, at in zip(paths, leaves, placed) if not split_of(at.moment)[1]]
            small = [leaf.size for path, leaf in whole if not splits(path)]
            lines.append(
                f"  split over {parts} devices; whole by rule: {len(small)} vectors of {sum(small):,} parameters"
            )
            lines += [
                f"  whole, because {parts} divides none of its axes: {path} {list(leaf.shape)}"
                for path, leaf in whole
                if splits(path)
            ]
        return cls(4 * held("param"), 8 * held("moment"), 4 * held("total"), mode, lines)


def _attention(config: RunConfig, platform: str, dtype: str, draft: DraftConfig) -> str:
    """The attention implementation of a run; a GPU is taken to be NVIDIA's."""
    kind = "NVIDIA" if platform == "gpu" else platform
    return resolve_attention(config.train.attention, platform, kind, dtype, draft.head_dim)


def _shape(config: RunConfig, dtype: str, platform: str, devices: int) -> Shape:
    """What one device works on in a micro-step."""
    seq = config.train.seq
    return Shape(
        rows=config.train.batch_rows * seq // devices,
        length=config.data.row_tokens,
        num_anchors=-(-config.objective.num_anchors // seq),
        dtype_bytes=_BYTES[dtype],
        platform=platform,
        chunk_rows=config.objective.chunk_rows,
        rematerialise=config.train.rematerialise,
        sequence_parts=seq,
    )


def _memory(
    config: RunConfig,
    draft: DraftConfig,
    target_config: dict,
    shape: Shape,
    dtype: str,
    attention: str,
    state: _State,
) -> dict[str, int]:
    train = config.train
    parameters = sum(parameter_groups(draft).values())
    d = draft.hidden_size
    text = target_config.get("text_config") or target_config
    tied = bool(text.get("tie_word_embeddings", target_config.get("tie_word_embeddings", False)))
    head_item = _BYTES[resolve_dtype(config.target.dtype, shape.platform)]
    head = (1 if tied else 2) * draft.vocab_size * d * head_item
    states = shape.rows * shape.length // shape.sequence_parts * (draft.num_taps + 1) * d * head_item
    memory = {
        "parameters (fp32)": state.parameters,
        "Adam moments (fp32)": state.moments,
        "gradient accumulator (fp32)": state.accumulator,
        "frozen embedding and head": head // (train.fsdp if train.split_head else 1),
        "staging of captured states": STAGING_SLOTS * states,
    }
    kernels = layer_parameters(draft) * draft.num_hidden_layers + draft.num_taps * d * d
    if dtype != "float32":
        memory[f"kernels ({dtype})"] = shape.dtype_bytes * kernels
    if state.mode == "fully_sharded":
        # Of a kernel that has a rounded copy the masters are not read.
        memory["gathered parameters (fp32)"] = 4 * (parameters - (kernels if dtype != "float32" else 0))
        if train.split_accumulator:
            memory["gradients of a micro-step (fp32)"] = 4 * parameters
    if train.split_head:
        memory["gathered embedding and head"] = 2 * draft.vocab_size * d * head_item
    memory |= {f"temporary: {name}": size for name, size in step_memory(draft, shape, attention).items()}
    weights = _target_weights(config)
    if weights:
        memory["target's weights (their files)"] = weights
    return memory


def _target_weights(config: RunConfig) -> int:
    folder = Path(config.target.path)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0


def _flops(config: RunConfig, draft: DraftConfig, shape: Shape, devices: int) -> dict[str, float]:
    """Operations of one optimizer step over all devices, at full rows."""
    steps = config.train.accumulation * devices
    return {name: steps * value for name, value in step_flops(draft, shape).items()}


def format_plan(config: RunConfig, plan: Plan) -> str:
    """The plan as text: resolved configuration, then the tables."""
    train, draft = config.train, plan.draft
    window = train.batch_rows * train.accumulation
    length = (
        f"{train.steps} optimizer steps"
        if train.steps is not None
        else f"{train.epochs} epochs: floor(epochs x rows / {window}) optimizer steps, known once the data are read"
    )
    lines = [
        "# resolved configuration",
        dump(config).rstrip(),
        "",
        f"# plan for {plan.platform}, compute in {plan.dtype}, {plan.devices} device(s)",
        f"draft: {draft.num_hidden_layers} layers, hidden {draft.hidden_size}, block {draft.block_size}, taps"
        f" {list(draft.target_layer_ids)} of {draft.num_target_layers}, mask token {draft.mask_token_id},"
        f" vocabulary {draft.vocab_size}",
        f"length: {length}; {window} rows of {config.data.row_tokens} tokens each"
        f" ({train.accumulation} micro-steps of {train.batch_rows}){_packing_text(config)}",
        f"objective: chunks of {plan.chunk} rows; target logits in products of"
        f" {', '.join(map(str, target_sizes_for(plan.chunk)))} rows, the smallest that holds a chunk's positions",
        "",
        *plan.state,
        "",
        *_table("trainable parameters", plan.parameters, lambda n: f"{n:,}"),
        "",
        *_table("memory per device, estimated", plan.memory, lambda n: f"{n / 2**30:.3f} GiB"),
        "",
        *_table("operations per optimizer step, estimated (target's forward not counted)", plan.flops, _flop_text),
    ]
    return "\n".join(lines)


def _packing_text(config: RunConfig) -> str:
    if config.data.packing == "none":
        return ", one conversation each"
    cap = config.objective.anchors_per_document
    anchors = "" if cap is None else f" and their anchors, at most {cap} each, fit {config.objective.num_anchors}"
    return f", packed: as many conversations of at most {config.data.max_length} tokens as fit{anchors}"


def _flop_text(value: float) -> str:
    return f"{value / 1e12:.3f} TFLOP"


def _table(title, values, text) -> list[str]:
    rows = [*values.items(), ("total", sum(values.values()))]
    wide = max(len(name) for name, _ in rows)
    right = max(len(text(value)) for _, value in rows)
    return [title, *(f"  {name:<{wide}}  {text(value):>{right}}" for name, value in rows)]
