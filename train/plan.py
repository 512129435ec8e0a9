"""`--plan`: what a run would be, computed from the target's config.json alone: no weights, no data, no device."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from draft_jax.config import DraftConfig
from draft_jax.cost import Shape, layer_parameters, step_flops, step_memory
from draft_jax.objective.config import target_sizes_for

from .config import RunConfig
from .config_file import dump
from .resolve import read_target_config, resolve_attention, resolve_draft, resolve_dtype

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
    """

    draft: DraftConfig
    platform: str
    dtype: str
    parameters: dict[str, int]
    memory: dict[str, int]
    flops: dict[str, float]
    chunk: int


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


def make_plan(config: RunConfig, platform: str) -> Plan:
    """Resolve the draft and estimate memory and operations.

    Args:
        config: the run.
        platform: where it would run: cpu, gpu or tpu.
    """
    target_config = read_target_config(config.target)
    draft = resolve_draft(config, target_config)
    dtype = resolve_dtype(config.train.dtype, platform)
    shape = _shape(config, dtype, platform)
    return Plan(
        draft=draft,
        platform=platform,
        dtype=dtype,
        parameters=parameter_groups(draft),
        memory=_memory(config, draft, target_config, shape, dtype, _attention(config, platform, dtype, draft)),
        flops=_flops(config, draft, shape),
        chunk=shape.chunk(draft),
    )


def _attention(config: RunConfig, platform: str, dtype: str, draft: DraftConfig) -> str:
    """The attention implementation of a run; a GPU is taken to be NVIDIA's."""
    kind = "NVIDIA" if platform == "gpu" else platform
    return resolve_attention(config.train.attention, platform, kind, dtype, draft.head_dim)


def _shape(config: RunConfig, dtype: str, platform: str) -> Shape:
    """What one device works on in a micro-step."""
    return Shape(
        rows=config.train.batch_rows // config.train.devices,
        length=config.data.row_tokens,
        num_anchors=config.objective.num_anchors,
        dtype_bytes=_BYTES[dtype],
        platform=platform,
        chunk_rows=config.objective.chunk_rows,
    )


def _memory(
    config: RunConfig, draft: DraftConfig, target_config: dict, shape: Shape, dtype: str, attention: str
) -> dict[str, int]:
    train = config.train
    parameters = sum(parameter_groups(draft).values())
    d = draft.hidden_size
    text = target_config.get("text_config") or target_config
    tied = bool(text.get("tie_word_embeddings", target_config.get("tie_word_embeddings", False)))
    head_item = _BYTES[resolve_dtype(config.target.dtype, shape.platform)]
    memory = {
        "parameters (fp32)": 4 * parameters // train.fsdp,
        "Adam moments (fp32)": 8 * parameters // train.fsdp,
        "gradient accumulator (fp32)": 4 * parameters // train.fsdp,
        "frozen embedding and head": (1 if tied else 2) * draft.vocab_size * d * head_item,
        "staging of captured states": STAGING_SLOTS * shape.rows * shape.length * (draft.num_taps + 1) * d * head_item,
    }
    if dtype != "float32":
        kernels = layer_parameters(draft) * draft.num_hidden_layers + draft.num_taps * d * d
        memory[f"kernels ({dtype})"] = shape.dtype_bytes * kernels
    if train.fsdp > 1:
        memory["gathered parameters and their gradients (fp32)"] = 8 * parameters
    memory |= {f"temporary: {name}": size for name, size in step_memory(draft, shape, attention).items()}
    weights = _target_weights(config)
    if weights:
        memory["target's weights (their files)"] = weights
    return memory


def _target_weights(config: RunConfig) -> int:
    folder = Path(config.target.path)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0


def _flops(config: RunConfig, draft: DraftConfig, shape: Shape) -> dict[str, float]:
    """Operations of one optimizer step over all devices, at full rows."""
    steps = config.train.accumulation * config.train.devices
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
        f"# plan for {plan.platform}, compute in {plan.dtype}, {train.devices} device(s)",
        f"draft: {draft.num_hidden_layers} layers, hidden {draft.hidden_size}, block {draft.block_size}, taps"
        f" {list(draft.target_layer_ids)} of {draft.num_target_layers}, mask token {draft.mask_token_id},"
        f" vocabulary {draft.vocab_size}",
        f"length: {length}; {window} rows of {config.data.row_tokens} tokens each"
        f" ({train.accumulation} micro-steps of {train.batch_rows}){_packing_text(config)}",
        f"objective: chunks of {plan.chunk} rows; target logits in products of"
        f" {', '.join(map(str, target_sizes_for(plan.chunk)))} rows, the smallest that holds a chunk's positions",
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
