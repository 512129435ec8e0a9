"""Safetensors names and parameter paths: ONE table, read in both directions.

A file holds torch layout: every linear weight is `[out, in]` and is transposed into a kernel `[in, out]`;
embeddings (both Markov tables included), norms and biases are taken as they are (field_survey 3.7).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from safetensors import safe_open

from draft_jax.batch import FrozenHead
from draft_jax.config import DraftConfig

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# Wrappers put these before every name; serving wants none, but accepts the first on backbone tensors.
PREFIXES = ("model.", "draft_model.", "module.")
# Not the draft's: the target's two matrices, and buffers that are recomputed.
FROZEN_NAMES = ("embed_tokens.weight", "lm_head.weight")
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_FLOATS = ("bfloat16", "float16", "float32")


class WeightsError(ValueError):
    """A tensor is missing, unknown, or of the wrong shape or dtype; the message names it."""


@dataclass(frozen=True)
class TensorRule:
    """One line of the table.

    Attributes:
        name: in the safetensors file.
        path: keys down the parameter tree.
        transpose: whether the file holds the transpose of the parameter.
    """

    name: str
    path: tuple[str, ...]
    transpose: bool


@dataclass(frozen=True)
class LoadReport:
    """What a folder held besides what was loaded.

    Attributes:
        folder: the folder.
        files: the safetensors files read, in order.
        loaded: number of tensors loaded.
        ignored: name in the file -> shape, of the target's embedding and head and of buffers, which are not
            loaded.
        stripped: wrapper prefixes that were removed from names.
    """

    folder: Path
    files: tuple[str, ...]
    loaded: int
    ignored: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stripped: tuple[str, ...] = ()

    def format(self) -> str:
        """One line for a log."""
        text = f"{self.folder}: {self.loaded} tensors from {', '.join(self.files)}"
        if self.stripped:
            text += f"; prefix removed: {', '.join(self.stripped)}"
        if self.ignored:
            text += f"; not loaded (the target's own): {', '.join(self.ignored)}"
        return text


def table(config: DraftConfig) -> tuple[TensorRule, ...]:
    """Every trained tensor of a draft."""

    def linear(name: str, *path: str, bias: bool = False) -> Iterator[TensorRule]:
        yield TensorRule(f"{name}.weight", (*path, "kernel"), transpose=True)
        if bias:
            yield TensorRule(f"{name}.bias", (*path, "bias"), transpose=False)

    def norm(name: str, *path: str) -> TensorRule:
        return TensorRule(f"{name}.weight", (*path, "scale"), transpose=False)

    rules: list[TensorRule] = [*linear("fc", "fc"), norm("hidden_norm", "hidden_norm"), norm("norm", "norm")]
    for i in map(str, range(config.num_hidden_layers)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            rules.append(norm(f"layers.{i}.{name}", "layers", i, name))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            rules += linear(f"layers.{i}.self_attn.{name}", "layers", i, "self_attn", name)
        for name in ("q_norm", "k_norm"):
            rules.append(norm(f"layers.{i}.self_attn.{name}", "layers", i, "self_attn", name))
        for name in ("gate_proj", "up_proj", "down_proj"):
            rules += linear(f"layers.{i}.mlp.{name}", "layers", i, "mlp", name)
    if config.markov_rank:
        for name in ("markov_w1", "markov_w2"):
            rules.append(TensorRule(f"markov_head.{name}.weight", ("markov", name, "embedding"), transpose=False))
        extra = {"gated": "gate_proj", "rnn": "joint_proj"}.get(config.markov_head_type)
        if extra:
            rules += linear(f"markov_head.{extra}", "markov", extra, bias=True)
    if config.enable_confidence_head:
        rules += linear("confidence_head.proj", "confidence", "proj", bias=True)
    return tuple(rules)


def to_torch_layout(
    params: Mapping[str, Any], config: DraftConfig, dtype: DTypeLike = ml_dtypes.bfloat16
) -> dict[str, np.ndarray]:
    """Parameters as they are written to a file.

    Args:
        params: the parameter tree (arrays on any device).
        config: its draft.
        dtype: of every returned array; rounding is to nearest even.

    Returns:
        Name -> C-contiguous array in torch layout; exactly the names of `config.parameter_shapes()`.

    Raises:
        WeightsError: the tree lacks a parameter, holds an unknown one, or one has another shape.
    """
    leaves = {
        tuple(str(entry.key) for entry in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    tensors = {}
    for rule in table(config):
        if rule.path not in leaves:
            raise WeightsError(f"parameters lack {'/'.join(rule.path)} (tensor {rule.name})")
        array = np.asarray(leaves.pop(rule.path)).astype(dtype)
        tensors[rule.name] = np.ascontiguousarray(array.T if rule.transpose else array)
    if leaves:
        raise WeightsError(
            f"parameters hold {', '.join('/'.join(path) for path in leaves)}, unknown to the draft config"
        )
    audit({name: tensor.shape for name, tensor in tensors.items()}, config)
    return tensors


def from_torch_layout(
    tensors: Mapping[str, np.ndarray], config: DraftConfig, dtype: DTypeLike = jnp.float32
) -> dict[str, Any]:
    """Parameters from named arrays in torch layout.

    The target's embedding and LM head, if among them, are left out; wrapper prefixes are removed.

    Args:
        tensors: name -> array of bf16, fp16 or fp32.
        config: the draft they belong to.
        dtype: of the returned parameters.

    Raises:
        WeightsError: a tensor is missing, unknown, or of another shape or dtype, by name.
    """
    names, _, _ = _draft_names(tensors)
    audit({name: tensors[source].shape for name, source in names.items()}, config)
    params: dict[str, Any] = {}
    for rule in table(config):
        array = np.asarray(tensors[names[rule.name]])
        if array.dtype.name not in _FLOATS:
            raise WeightsError(f"tensor {rule.name} has dtype {array.dtype.name}; expected one of {', '.join(_FLOATS)}")
        node = params
        for key in rule.path[:-1]:
            node = node.setdefault(key, {})
        # Cast on the host and copy: no view of a memory-mapped file may outlive it.
        node[rule.path[-1]] = jnp.array(np.array((array.T if rule.transpose else array).astype(dtype), order="C"))
    return params


def audit(shapes: Mapping[str, tuple[int, ...]], config: DraftConfig) -> None:
    """Compares name -> shape with what the config describes, both ways. Serving does not (field_survey 0.5).

    Raises:
        WeightsError: naming every missing, unknown and misshapen tensor (the first ten of each).
    """
    expected = config.parameter_shapes()
    faults = [
        ("missing", [name for name in expected if name not in shapes]),
        ("unknown", [name for name in shapes if name not in expected]),
        (
            "wrong shape",
            [
                f"{name} {list(shapes[name])}, expected {list(shape)}"
                for name, shape in expected.items()
                if name in shapes and tuple(shapes[name]) != shape
            ],
        ),
    ]
    found = "; ".join(f"{kind}: {_few(names)}" for kind, names in faults if names)
    if found:
        raise WeightsError(f"the tensors are not those of this draft's config: {found}")


def load_folder(folder: str | Path) -> tuple[DraftConfig, dict[str, Any], LoadReport]:
    """Reads a DSpark folder in DeepSpec's, SpecForge's or our layout: one safetensors file or a sharded
    index.

    Returns:
        The config, fp32 parameters, and what was left out.

    Raises:
        WeightsError: a file or tensor is missing, unknown or of the wrong kind, by name.
        ValueError: the config.json is not a readable draft's.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise WeightsError(f"{folder} is not a draft's folder: it has no config.json")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON: {error}") from error
    try:
        config = DraftConfig.from_hf(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        files = _files(folder)
        tensors = _read(folder, files)
        _, ignored, stripped = _draft_names(tensors)
        params = from_torch_layout(tensors, config)
    except WeightsError as error:
        raise WeightsError(f"{folder}: {error}") from error
    report = LoadReport(
        folder=folder,
        files=tuple(files),
        loaded=len(config.parameter_shapes()),
        ignored={name: tuple(tensors[name].shape) for name in ignored},
        stripped=tuple(stripped),
    )
    return config, params, report


def check_frozen(folder: str | Path, frozen: FrozenHead) -> tuple[str, ...]:
    """Compares an embedding or LM head stored in a draft's folder with the target's, bit for bit.

    A draft that was trained with another head than the target's would be evaluated with the wrong one,
    silently.

    Args:
        folder: the draft's folder.
        frozen: the target's matrices; compared in the file's dtype, over the rows both have.

    Returns:
        The names compared; empty when the folder holds neither.

    Raises:
        WeightsError: a stored matrix differs from the target's, by name.
    """
    folder = Path(folder)
    tensors = _read(folder, _files(folder), only=FROZEN_NAMES)
    for name, stored in tensors.items():
        own = np.asarray(frozen.embedding if name.endswith(FROZEN_NAMES[0]) else frozen.lm_head)
        rows = min(len(own), len(stored))
        if stored.shape[1:] != own.shape[1:]:
            raise WeightsError(f"{folder}: {name} has shape {list(stored.shape)}, the target's is {list(own.shape)}")
        if not np.array_equal(stored[:rows], own[:rows].astype(stored.dtype)):
            raise WeightsError(f"{folder}: {name} differs from the target's: this draft belongs to another target")
    return tuple(tensors)


def _draft_names(names: Iterable[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Plain name -> name in the file, for the draft's own tensors; the ignored names; the prefixes met."""
    own: dict[str, str] = {}
    ignored: list[str] = []
    stripped: list[str] = []
    for source in names:
        name = source
        while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
            name = name.removeprefix(prefix)
            if prefix not in stripped:
                stripped.append(prefix)
        if name in FROZEN_NAMES or name.endswith(_IGNORED_SUFFIXES):
            ignored.append(source)
        elif name in own:
            raise WeightsError(f"tensors {own[name]} and {source} are both {name}")
        else:
            own[name] = source
    return own, ignored, stripped


def _files(folder: Path) -> list[str]:
    """The safetensors files of a folder, checked for existence."""
    index, single = folder / INDEX_FILE, folder / WEIGHTS_FILE
    if single.is_file():
        if index.is_file():
            raise WeightsError(f"both {WEIGHTS_FILE} and {INDEX_FILE} are there: remove the one that is stale")
        return [WEIGHTS_FILE]
    if not index.is_file():
        raise WeightsError(f"no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE} is there")
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise WeightsError(f"{INDEX_FILE} is not an index of tensors: {error!r}") from error
    for name in files:
        if not (folder / name).is_file():
            lost = [tensor for tensor, file in weight_map.items() if file == name]
            raise WeightsError(f"shard {name} of {INDEX_FILE} is missing, and with it {_few(lost)}")
    return files


def _read(folder: Path, files: Iterable[str], only: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """All tensors of the files; of `only` those names (with any prefix) when given."""
    tensors: dict[str, np.ndarray] = {}
    for name in files:
        try:
            with safe_open(folder / name, framework="numpy") as file:
                for tensor in file.keys():  # noqa: SIM118 - not a dict
                    if tensor in tensors:
                        raise WeightsError(f"tensor {tensor} is in more than one shard")
                    if not only or tensor.endswith(only):
                        tensors[tensor] = file.get_tensor(tensor)
        except WeightsError:
            raise
        except Exception as error:  # safetensors raises its own type, and TypeError for dtypes numpy lacks
            raise WeightsError(f"{name} cannot be read: {error}") from error
    return tensors


def _few(names: list[str], limit: int = 10) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
