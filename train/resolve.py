"""From what a configuration asks to what a run does: the target's facts, the draft's shape, steps and precision."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draft_jax import hf_config
from draft_jax.attention import choose_implementation
from draft_jax.config import DraftConfig

from .config import ConfigError, DraftSpec, RunConfig, TargetConfig, TrainConfig
from .sharding import Placement

#: DraftSpec field -> DraftConfig field, where they are called differently.
_RENAMED = {"layers": "num_hidden_layers"}
_DEFAULTS = {"layers": 5, "block_size": 7, "markov_rank": 256, "enable_confidence_head": True}


def read_target_file(target: TargetConfig, name: str) -> Path:
    """Path of one small file of the target: in its folder, or fetched from the hub into the hub's cache.

    Raises:
        ConfigError: there is no such folder, file or hub model.
    """
    folder = Path(target.path)
    if folder.is_dir():
        if not (folder / name).is_file():
            raise ConfigError(f"target.path is {target.path!r}; that folder is not a model, it has no {name}")
        return folder / name
    if folder.is_absolute() or target.path.startswith((".", "~")) or target.path.count("/") > 1:
        raise ConfigError(f"target.path is {target.path!r}; there is no such folder")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(target.path, name, revision=target.revision))
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"target.path is {target.path!r}; neither a folder here nor a hub model whose {name} can be fetched"
            f" ({reason})"
        ) from error


def read_target_config(target: TargetConfig) -> dict[str, Any]:
    """The target's config.json as a plain dict; no weights are touched."""
    path = read_target_file(target, "config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, not a model's configuration")
    return config


def resolve_draft(config: RunConfig, target_config: Mapping[str, Any]) -> DraftConfig:
    """The draft a run trains: the target's dimensions, what the configuration says, stated defaults for the rest.

    With `draft.init_draft` the folder's own config decides, and whatever the configuration says besides must agree.

    Args:
        config: the run.
        target_config: the target's config.json.

    Raises:
        ConfigError: a value cannot be chosen or contradicts the draft to start from; named.
    """
    spec = config.draft
    if spec.init_draft is not None:
        return _from_folder(Path(spec.init_draft), spec, target_config)
    chosen = _chosen(spec) if spec.num_taps is None else {**_chosen(spec), "num_taps": spec.num_taps}
    for name, value in _DEFAULTS.items():
        chosen.setdefault(_RENAMED.get(name, name), value)
    if "mask_token_id" not in chosen:
        chosen["mask_token_id"] = _free_row(config.target, target_config)
    both = chosen["markov_rank"] > 0 and chosen["enable_confidence_head"]
    chosen.setdefault("confidence_head_with_markov", both)
    try:
        return DraftConfig.from_target(
            target_config, num_anchors=config.objective.num_anchors, target_name=config.target.path, **chosen
        )
    except ValueError as error:
        raise ConfigError(f"draft: {error}") from error


def _chosen(spec: DraftSpec) -> dict[str, Any]:
    """What the configuration says of the draft, by DraftConfig's names."""
    names = (
        "layers", "target_layer_ids", "block_size", "mask_token_id", "markov_rank", "markov_head_type",
        "enable_confidence_head", "confidence_head_with_markov", "intermediate_size",
    )  # fmt: skip
    return {_RENAMED.get(n, n): getattr(spec, n) for n in names if getattr(spec, n) is not None}


def _from_folder(folder: Path, spec: DraftSpec, target_config: Mapping[str, Any]) -> DraftConfig:
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"draft.init_draft is {str(folder)!r}; that folder is not a draft, it has no config.json")
    draft = DraftConfig.from_hf(json.loads(file.read_text(encoding="utf-8")))
    expected = _chosen(spec)
    if spec.num_taps is not None and spec.num_taps != draft.num_taps:
        raise ConfigError(f"draft.num_taps is {spec.num_taps}, but {folder} has {draft.num_taps}; leave it out")
    for name, value in expected.items():
        if getattr(draft, name) != value:
            raise ConfigError(
                f"draft.{_spec_name(name)} is {value!r}, but {folder} has {getattr(draft, name)!r}; leave it out to"
                " start from that draft"
            )
    target = hf_config.read_target(target_config)
    for name in ("hidden_size", "vocab_size", "num_target_layers"):
        if getattr(draft, name) != target[name]:
            raise ConfigError(
                f"draft.init_draft {folder} was made for another target: its {name} is {getattr(draft, name)}, this"
                f" target has {target[name]}"
            )
    return draft


def _spec_name(name: str) -> str:
    return next((ours for ours, theirs in _RENAMED.items() if theirs == name), name)


def _free_row(target: TargetConfig, target_config: Mapping[str, Any]) -> int:
    """First embedding row past the tokenizer's last token (the rule behind Qwen's 151669, dspark_spec 1.8)."""
    text = target_config.get("text_config") or target_config
    vocab_size = text["vocab_size"]
    tokenizer = json.loads(read_target_file(target, "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer.get("model", {}).get("vocab", {})
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    added = [(token["id"], token["content"]) for token in tokenizer.get("added_tokens", [])]
    first_free = max([*ids, *(i for i, _ in added)], default=-1) + 1
    if first_free < vocab_size:
        return first_free
    candidates = ", ".join(f"{i} {content!r}" for i, content in added[:12])
    raise ConfigError(
        f"draft.mask_token_id is not given and the target has no free embedding row ({vocab_size} rows, all with a"
        f" token); give the id of a special token no text uses, one of: {candidates}"
    )


def resolve_steps(train: TrainConfig, rows: int) -> int:
    """Optimizer steps of the run: as given, or whole windows in `epochs` passes over so many rows of data."""
    if train.steps is not None:
        return train.steps
    window = train.batch_rows * train.accumulation
    steps = math.floor((train.epochs or 0) * rows / window)
    if steps < 1:
        raise ConfigError(
            f"train.epochs is {train.epochs}; {rows} rows of data do not fill one optimizer step of {window}"
            f" (batch_rows {train.batch_rows} x accumulation {train.accumulation})"
        )
    return steps


def resolve_dtype(name: str, platform: str) -> str:
    """`auto` is bfloat16 on an accelerator, float32 on a CPU."""
    if name != "auto":
        return name
    return "float32" if platform == "cpu" else "bfloat16"


def resolve_attention(name: str, platform: str, device_kind: str, dtype: str, head_dim: int) -> str:
    """The attention implementation of a run; see `draft_jax.attention.choose_implementation`.

    Raises:
        ConfigError: the kernel was asked for by name and cannot run here.
    """
    try:
        return choose_implementation(name, platform, device_kind, dtype, head_dim)
    except ValueError as error:
        raise ConfigError(f"train.attention is {name!r}; {error}") from error


def placement_of(config: RunConfig) -> Placement:
    """What of the state the run splits."""
    train = config.train
    mode = None if train.sharding == "auto" else train.sharding
    return Placement(mode, split_accumulator=train.split_accumulator, split_head=train.split_head)


def check_division(config: RunConfig, devices: int) -> None:
    """Refuse a mesh or rows that do not divide over `devices`, those of all processes.

    Raises:
        ConfigError: names the key, its value and the remedy.
    """
    train = config.train
    if devices % (train.fsdp * train.seq):
        seq = f" times train.seq {train.seq}" if train.seq > 1 else ""
        raise ConfigError(f"train.fsdp is {train.fsdp}{seq}; it must divide the {devices} devices of all processes")
    if train.batch_rows % (devices // train.seq):
        seq = f", divided by train.seq {train.seq}" if train.seq > 1 else ""
        raise ConfigError(
            f"train.batch_rows is {train.batch_rows}; make it a multiple of the {devices} devices of all processes{seq}"
        )
    if config.data.row_tokens % train.seq:
        raise ConfigError(
            f"train.seq is {train.seq}; it must divide the {config.data.row_tokens} tokens of a row (data.row_length,"
            " data.max_length)"
        )
