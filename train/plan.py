"""`--plan`: what a run would be, computed from the target's config.json alone: no weights, no data, no device."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from draft_jax.config import DraftConfig
from draft_jax.objective.config import chunk_rows_for

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
    """

    draft: DraftConfig
    platform: str
    dtype: str
    parameters: dict[str, int]
    memory: dict[str, int]
    flops: dict[str, float]


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
    return Plan(
        draft=draft,
        platform=platform,
        dtype=dtype,
        parameters=parameter_groups(draft),
        memory=_memory(config, draft, target_config, dtype, platform),
        flops=_flops(config, draft),
    )


def _rows(config: RunConfig, draft: DraftConfig) -> int:
    """Draft rows (anchors x slots) of one micro-step, over all devices."""
    return config.train.batch_rows * config.objective.num_anchors * draft.block_size


def _memory(config: RunConfig, draft: DraftConfig, target_config: dict, dtype: str, platform: str) -> dict[str, int]:
    train = config.train
    item = _BYTES[dtype]
    parameters = sum(parameter_groups(draft).values())
    local_rows = train.batch_rows // train.devices  # [b] rows of one device
    rows = _rows(config, draft) // train.devices
    d, width, length = draft.hidden_size, draft.intermediate_size, config.data.max_length
    query = draft.num_attention_heads * draft.head_dim
    kv = draft.num_key_value_heads * draft.head_dim
    text = target_config.get("text_config") or target_config
    tied = bool(text.get("tie_word_embeddings", target_config.get("tie_word_embeddings", False)))
    head_item = _BYTES[resolve_dtype(config.target.dtype, platform)]
    # Kept for the backward pass of one layer: residual, two norms, q, k, v, attention output, three MLP widths.
    per_row = item * (4 * d + 2 * query + 2 * kv + 3 * width)
    # A GPU is taken to be one of NVIDIA's. The kernel keeps one log-sum-exp per query and no scores.
    kind = "NVIDIA" if platform == "gpu" else platform
    if resolve_attention(train.attention, platform, kind, dtype, draft.head_dim) == "xla":
        scores = rows * draft.num_attention_heads * (length + draft.block_size) * 4 * 2  # fp32 scores and weights
    else:
        scores = rows * draft.num_attention_heads * 4
    context = local_rows * length * (2 * kv * item + 0)
    chunk = config.objective.chunk_rows or chunk_rows_for(rows, draft.vocab_size, platform=platform)
    memory = {
        "parameters (fp32)": 4 * parameters // train.fsdp,
        "Adam moments (fp32)": 8 * parameters // train.fsdp,
        "gradient accumulator (fp32)": 4 * parameters // train.fsdp,
        "gradient of a micro-step (fp32)": 4 * parameters // train.fsdp,
        "frozen embedding and head": (1 if tied else 2) * draft.vocab_size * d * head_item,
        "staging of captured states": STAGING_SLOTS * local_rows * length * (draft.num_taps + 1) * d * item,
        "objective chunk (fp32 logits)": 4 * 4 * min(chunk, rows) * draft.vocab_size,
        "activations of the draft": draft.num_hidden_layers * (rows * per_row + context + scores)
        + local_rows * length * 2 * d * item,
    }
    weights = _target_weights(config)
    if weights:
        memory["target's weights (their files)"] = weights
    return memory


def _target_weights(config: RunConfig) -> int:
    folder = Path(config.target.path)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0


def _flops(config: RunConfig, draft: DraftConfig) -> dict[str, float]:
    """Operations of one optimizer step (the method of dspark_spec 8.1, at full rows of `data.max_length`)."""
    tokens = config.train.batch_rows * config.data.max_length
    rows = _rows(config, draft)
    d, width, layers = draft.hidden_size, draft.intermediate_size, draft.num_hidden_layers
    query = draft.num_attention_heads * draft.head_dim
    kv = draft.num_key_value_heads * draft.head_dim
    linear = d * (query + 2 * kv) + query * d + 3 * d * width
    mean_keys = config.data.max_length / 2 + draft.block_size
    target_rows = min(rows, tokens)
    forward = {
        # name: (forward, what the backward pass costs in units of the forward)
        "fc": (2.0 * tokens * draft.num_taps * d * d, 1.0),
        "context keys and values": (2.0 * tokens * d * 2 * kv * layers, 2.0),
        "block layers": (2.0 * rows * linear * layers, 2.0),
        "attention": (4.0 * rows * mean_keys * query * layers, 2.5),
        "vocabulary, draft": (2.0 * rows * d * draft.vocab_size, 1.0),
        "vocabulary, target": (2.0 * target_rows * d * draft.vocab_size, 0.0),
        "Markov head": (2.0 * rows * draft.markov_rank * draft.vocab_size, 2.0),
    }
    return {name: config.train.accumulation * once * (1 + back) for name, (once, back) in forward.items()}


def format_plan(config: RunConfig, plan: Plan) -> str:
    """The plan as text: resolved configuration, then the tables."""
    train, draft = config.train, plan.draft
    window = train.batch_rows * train.accumulation
    length = (
        f"{train.steps} optimizer steps"
        if train.steps is not None
        else f"{train.epochs} epochs: floor(epochs x samples / {window}) optimizer steps, known once the data are read"
    )
    lines = [
        "# resolved configuration",
        dump(config).rstrip(),
        "",
        f"# plan for {plan.platform}, compute in {plan.dtype}, {train.devices} device(s)",
        f"draft: {draft.num_hidden_layers} layers, hidden {draft.hidden_size}, block {draft.block_size}, taps"
        f" {list(draft.target_layer_ids)} of {draft.num_target_layers}, mask token {draft.mask_token_id},"
        f" vocabulary {draft.vocab_size}",
        f"length: {length}; {window} rows of {config.data.max_length} tokens each"
        f" ({train.accumulation} micro-steps of {train.batch_rows})",
        "",
        *_table("trainable parameters", plan.parameters, lambda n: f"{n:,}"),
        "",
        *_table("memory per device, estimated", plan.memory, lambda n: f"{n / 2**30:.3f} GiB"),
        "",
        *_table("operations per optimizer step, estimated (target's forward not counted)", plan.flops, _flop_text),
    ]
    return "\n".join(lines)


def _flop_text(value: float) -> str:
    return f"{value / 1e12:.3f} TFLOP"


def _table(title, values, text) -> list[str]:
    rows = [*values.items(), ("total", sum(values.values()))]
    wide = max(len(name) for name, _ in rows)
    right = max(len(text(value)) for _, value in rows)
    return [title, *(f"  {name:<{wide}}  {text(value):>{right}}" for name, value in rows)]
