"""Does a folder hold a draft that stock SGLang serves? Named checks, one line each (field_survey 3.7).

SGLang's loader is permissive: it skips unknown names and never reports missing backbone tensors, so a wrong
export serves uninitialised weights. Nothing here trusts it; the file is compared with the set of tensors its
own config demands, in both directions.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draft_jax.config import DraftConfig
from target_bridge.sglang_hooks import table_serving

WEIGHTS = "model.safetensors"
ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
#: Keys SGLang's head builders read at the top level while its parser reads the nested block (field_survey
#: 3.3).
DOUBLED_KEYS = (
    "target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov",
)  # fmt: skip
#: Tensors kept in fp32: the module that serves the confidence head computes in fp32.
FP32_PREFIX = "confidence_head."

Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True)
class Check:
    """One point of the checklist: its name, the outcome, and what was seen."""

    name: str
    status: Status
    detail: str

    @property
    def ok(self) -> bool:
        return self.status != "FAIL"

    def __str__(self) -> str:
        return f"{self.status:>4}  {self.name}: {self.detail}"


def check_export(folder: str | Path, target_info: Any = None) -> list[Check]:
    """Runs the whole checklist on a folder; never raises for a bad export, the list says what is bad.

    Args:
        folder: an exported draft.
        target_info: `TargetInfo` or `TargetFacts` of the target it will serve; the checks against the target
            appear as "warn ... not compared" without it.
    """
    checks = _Checks()
    folder = Path(folder)
    try:
        raw = json.loads((folder / "config.json").read_text())
        header, metadata = read_header(folder / WEIGHTS)
    except (OSError, ValueError, struct.error) as error:
        checks.add("files", False, f"cannot read the export: {error}")
        return checks.items
    checks.add("files", True, f"config.json and {WEIGHTS}, {sum(_size(e) for e in header.values()) / 2**20:.1f} MiB")
    _check_declarations(checks, raw)
    try:
        config = DraftConfig.from_hf(raw)
    except ValueError as error:
        checks.add("config", False, str(error))
        return checks.items
    checks.add("config", True, "read back as a DraftConfig")
    _check_values(checks, raw, config)
    _check_tensors(checks, header, metadata, config)
    if all(check.ok for check in checks.items):
        _check_numbers(checks, folder / WEIGHTS)
    _check_target(checks, raw, config, target_info)
    return checks.items


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Header of a safetensors file: name -> {dtype, shape, data_offsets}, and its metadata.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a complete safetensors file.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            raise ValueError(f"{path} is no safetensors file: its header would be longer than the file")
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if path.stat().st_size != 8 + length + end:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, its header describes {8 + length + end}")
    return header, metadata


class _Checks:
    def __init__(self):
        self.items: list[Check] = []

    def add(self, name: str, passed: bool, detail: str, bad: Status = "FAIL") -> None:
        self.items.append(Check(name, "ok" if passed else bad, detail))


def _check_declarations(checks: _Checks, raw: Mapping[str, Any]) -> None:
    """What can be said of config.json before it is understood."""
    nested = raw.get("dflash_config") or {}
    checks.add("no auto_map", "auto_map" not in raw, "absent" if "auto_map" not in raw else "present: remove it")
    checks.add(
        "model_type",
        raw.get("model_type") == "qwen3",
        f"{raw.get('model_type')!r} (AutoConfig needs 'qwen3')",
    )
    names = raw.get("architectures") or []
    checks.add("architectures", len(names) == 1 and names[0] in ARCHITECTURES, f"{names}")
    checks.add("projector_type", nested.get("projector_type") == "dspark", f"{nested.get('projector_type')!r}")
    wrong = [
        f"{key}: nested {nested.get(key, 'absent')!r}, top level {raw.get(key, 'absent')!r}"
        for key in DOUBLED_KEYS
        if key not in nested or key not in raw or nested[key] != raw[key]
    ]
    checks.add("nested = top level", not wrong, "; ".join(wrong) or ", ".join(DOUBLED_KEYS))
    explicit = [key for key in ("head_dim", "block_size", "num_target_layers") if not _is_int(raw.get(key))]
    checks.add(
        "explicit sizes", not explicit,
        f"missing at the top level: {', '.join(explicit)}" if explicit
        else "head_dim, block_size, num_target_layers",
    )  # fmt: skip
    checks.add("sample_from_anchor", raw.get("sample_from_anchor") is True, f"{raw.get('sample_from_anchor')!r}")
    _check_rope(checks, raw)
    layers, types = raw.get("num_hidden_layers"), raw.get("layer_types") or []
    sliding_ok = "sliding_attention" not in types or _is_int(raw.get("sliding_window"))
    checks.add("layer_types", len(types) == layers and sliding_ok, f"{len(types)} for {layers} layers")


def _check_rope(checks: _Checks, raw: Mapping[str, Any]) -> None:
    """Old readers take `rope_theta` + `rope_scaling`, new ones `rope_parameters`; they must say the same."""
    parameters, scaling = raw.get("rope_parameters"), raw.get("rope_scaling") or {}
    if "rope_theta" not in raw or "rope_scaling" not in raw or not isinstance(parameters, Mapping):
        missing = [key for key in ("rope_theta", "rope_scaling", "rope_parameters") if raw.get(key, ...) is ...]
        checks.add("rope, both forms", False, f"missing {', '.join(missing) or 'rope_parameters'}")
        return
    new = dict(parameters)
    theta = new.pop("rope_theta", None)
    old = {"rope_type": "default", **scaling}
    kind = old.pop("type", None)
    if kind is not None:
        old["rope_type"] = kind
    new = {"rope_type": "default", **new}
    same = theta == raw["rope_theta"] and old == new
    flat = not any(key.startswith("mrope") for key in (*scaling, *parameters))
    checks.add("rope, both forms", same and flat, f"theta {raw['rope_theta']} / {theta}, {old} / {new}")


def _check_values(checks: _Checks, raw: Mapping[str, Any], config: DraftConfig) -> None:
    """Values that must make sense together, whatever the target. DraftConfig itself has checked most of
    them.
    """
    checks.add(
        "markov head", config.markov_rank > 0,
        f"rank {config.markov_rank}, {config.markov_head_type}" if config.markov_rank
        else "markov_rank is 0: SGLang cannot serve a draft without a Markov head as DSPARK; train with "
        "draft.markov_rank above 0",
    )  # fmt: skip
    ids = list(config.target_layer_ids)
    taps_ok = ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] <= config.num_target_layers - 2
    checks.add("target_layer_ids", taps_ok, f"{ids} of {config.num_target_layers} layers")
    checks.add(
        "mask_token_id", _is_int(raw.get("mask_token_id")) and 0 <= config.mask_token_id < config.vocab_size,
        f"{config.mask_token_id} below vocab_size {config.vocab_size}",
    )  # fmt: skip
    checks.add("block_size", raw.get("block_size") == config.block_size, f"{config.block_size} proposals a round")
    checks.add(
        "confidence head", config.enable_confidence_head,
        "trained, written in fp32" if config.enable_confidence_head
        else "not trained: never serve this draft with SGLANG_RAGGED_VERIFY_MODE cap-accept or compact",
        bad="warn",
    )  # fmt: skip
    checks.add("dtype", raw.get("dtype", raw.get("torch_dtype")) == "bfloat16", f"{raw.get('dtype')!r}")
    checks.add(
        "untied",
        raw.get("tie_word_embeddings") is False,
        "tie_word_embeddings false: both come from the target",
    )


def _check_tensors(
    checks: _Checks, header: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str], config: DraftConfig
) -> None:
    """The file against the set the config demands: names and shapes both ways, dtypes, layout."""
    expected = config.parameter_shapes()
    missing, unknown = sorted(set(expected) - set(header)), sorted(set(header) - set(expected))
    wrong = [
        f"{name} is {tuple(header[name]['shape'])}, must be {shape}"
        for name, shape in expected.items()
        if name in header and tuple(header[name]["shape"]) != shape
    ]
    problems = [f"missing {name}" for name in missing] + [f"unknown {name}" for name in unknown] + wrong
    checks.add("tensors", not problems, "; ".join(problems) or f"{len(expected)} names and shapes, both ways")
    borrowed = [name for name in header if "embed_tokens" in name or "lm_head" in name]
    checks.add("no embedding or head", not borrowed, ", ".join(borrowed) or "both come from the target")
    fc = header.get("fc.weight", {}).get("shape")
    wanted = [config.hidden_size, config.num_taps * config.hidden_size]
    checks.add("fc.weight", fc == wanted, f"{fc} = [hidden, taps x hidden]")
    bad = [
        f"{name} is {entry['dtype']}"
        for name, entry in header.items()
        if entry["dtype"] not in (("F32", "BF16") if name.startswith(FP32_PREFIX) else ("BF16",))
    ]
    checks.add("tensor dtypes", not bad, "; ".join(bad) or "bf16, confidence head fp32")
    checks.add("format", metadata.get("format") == "pt", f"metadata format {metadata.get('format')!r}")
    spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    gaps = any(before[1] != after[0] for before, after in pairwise(spans))
    sizes = all(_size(entry) == _expected_bytes(entry) for entry in header.values())
    checks.add(
        "contiguous",
        not gaps and sizes and (not spans or spans[0][0] == 0),
        "rows one after the other, no gaps",
    )


def _check_numbers(checks: _Checks, path: Path) -> None:
    """Every stored value is finite: a draft of NaN proposes token 0 for ever and nobody notices."""
    from safetensors import safe_open

    bad = []
    with safe_open(str(path), framework="np") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            if not np.isfinite(file.get_tensor(name).astype(np.float32)).all():
                bad.append(name)
    checks.add("finite", not bad, ", ".join(bad) or "every value")


def _check_target(checks: _Checks, raw: Mapping[str, Any], config: DraftConfig, target: Any) -> None:
    if target is None:
        checks.add(
            "target",
            False,
            "not compared: name the target to check sizes, mask row and token ids",
            bad="warn",
        )
        return
    text = target.config
    for name, ours, theirs in (
        ("hidden_size = target's", config.hidden_size, target.hidden_size),
        ("vocab_size = target's", config.vocab_size, target.vocab_size),
        ("num_target_layers = target's", config.num_target_layers, target.num_layers),
    ):
        checks.add(name, ours == theirs, f"draft {ours}, target {theirs}")
    checks.add(
        "mask row exists", config.mask_token_id < target.vocab_size,
        f"id {config.mask_token_id}, the target's embedding has rows 0..{target.vocab_size - 1}",
    )  # fmt: skip
    checks.add(
        "max_position_embeddings", config.max_position_embeddings >= target.max_length,
        f"draft {config.max_position_embeddings}, target {target.max_length}: serve with --context-length "
        "at most the smaller",
        bad="warn",
    )  # fmt: skip
    differing = [
        f"{key} {raw.get(key)!r}, target {text.get(key)!r}"
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if text.get(key) is not None and raw.get(key) != text.get(key)
    ]
    checks.add("special ids = target's", not differing, "; ".join(differing) or "bos, eos, pad")
    classes = text.get("architectures")
    serving = table_serving(str(classes[0])) if classes else None
    checks.add(
        "target has a capture hook", serving is not None and serving.hook("DSPARK") is not None,
        serving.explain("DSPARK") if serving else "not known: the target's config.json names no architectures",
        bad="warn",
    )  # fmt: skip


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _size(entry: Mapping[str, Any]) -> int:
    start, end = entry["data_offsets"]
    return end - start


def _expected_bytes(entry: Mapping[str, Any]) -> int:
    return int(np.prod(entry["shape"], dtype=np.int64)) * (4 if entry["dtype"] == "F32" else 2)
