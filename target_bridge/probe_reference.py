"""What Transformers computes at every layer, to hold a target's taps against.

Independent of the bridge's own hooks: `output_hidden_states` of Transformers. A model that does not fit into memory
is loaded with as many of its first layers as do; taps beyond are then not compared, and that is said.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from target_bridge.hf_parts import find_parts, text_config
from target_bridge.hf_source import load_model
from target_bridge.target import TargetError, TargetInfo

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LayerStates:
    """Outputs of decoder layers on some documents.

    Attributes:
        source: Who computed them, for messages.
        layers: Layer index -> [T_i, D] per document: the residual stream after that layer.
        last: [T_i, D] per document after the final norm; None when not all layers were there.
    """

    source: str
    layers: dict[int, list[torch.Tensor]]
    last: list[torch.Tensor] | None


def transformers_states(
    model: nn.Module, documents: Sequence[np.ndarray], *, num_layers: int, source: str = "Transformers"
) -> LayerStates:
    """Every layer's output by a loaded Transformers model, one document at a time: nothing is padded or batched.

    Args:
        model: A causal LM, possibly cut to its first layers.
        documents: 1-D token ids.
        num_layers: Of the uncut model.
        source: See `LayerStates`.
    """
    here = int(text_config(model.config).num_hidden_layers)
    parts = find_parts(model, here, source)
    layers: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(here - 1)}
    last: list[torch.Tensor] = []
    for ids in documents:
        tokens = torch.as_tensor(np.asarray(ids), dtype=torch.int64, device=parts.embedding.device)[None]
        with torch.inference_mode():
            output = parts.decoder(input_ids=tokens, use_cache=False, output_hidden_states=True)
        # Entry 0 is the embedding; the entry of the last layer is already normalised, so it is no layer output.
        for layer in layers:
            layers[layer].append(output.hidden_states[layer + 1][0].float())
        last.append(output.last_hidden_state[0].float())
    return LayerStates(source, layers, last if here == num_layers else None)


def load_reference(
    name_or_path: str,
    documents: Sequence[np.ndarray],
    info: TargetInfo,
    *,
    budget: int,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LayerStates:
    """Load the target with Transformers onto the CPU, as far as it fits, run the documents, and forget it.

    Args:
        name_or_path: Folder or hub name of the target.
        documents: 1-D token ids.
        info: Of the target that is compared.
        budget: Bytes the weights may take. In float32 if that fits, else in the target's own dtype.
        revision: On the hub.
        trust_remote_code: Run the model's own Python code.

    Raises:
        TargetError: not even two layers fit, or Transformers cannot load it; the message says why.
    """
    base, layers = _weight_counts(_local_folder(name_or_path, revision), name_or_path)
    if len(layers) < 2:
        raise TargetError(f"target {name_or_path}: no two decoder layers found among the names of its tensors")
    dtype = next((d for d in ("float32", info.dtype) if _layers_within(base, layers, budget, d) == len(layers)), None)
    dtype = dtype or info.dtype
    count = _layers_within(base, layers, budget, dtype)
    if count < 2:
        need = (base + sum(layers[:2])) * _DTYPES[dtype].itemsize
        raise TargetError(
            f"embedding and two layers of target {name_or_path} take {need / 2**30:.1f} GiB in {dtype}, more than the "
            f"{budget / 2**30:.1f} GiB a comparison with Transformers may take"
        )
    whole = count == len(layers)
    model = load_model(
        name_or_path,
        dtype=_DTYPES[dtype],
        revision=revision,
        trust_remote_code=trust_remote_code,
        first_layers=None if whole else count,
    ).eval()
    source = f"Transformers in {dtype}" + ("" if whole else f", first {count} of {info.num_layers} layers")
    return transformers_states(model, documents, num_layers=info.num_layers, source=source)


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        if found:
            return int(found.group(1)) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _local_folder(name_or_path: str, revision: str | None) -> Path:
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:  # the target has just been loaded from there
        return Path(snapshot_download(name_or_path, revision=revision, local_files_only=True))
    except Exception as error:
        raise TargetError(f"target {name_or_path} is not in the hub's cache on this machine") from error


def _weight_counts(folder: Path, name: str) -> tuple[int, list[int]]:
    """(numbers outside the decoder layers, numbers per layer), from the headers of the weight files."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TargetError(f"target {name} has no safetensors, so there is nothing Transformers could load")
    base = 0
    layers: dict[int, int] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                size = int(np.prod(tensors.get_slice(key).get_shape(), dtype=np.int64))
                found = _LAYER.search(f".{key}")
                if found is None:
                    base += size
                else:
                    layers[int(found.group(1))] = layers.get(int(found.group(1)), 0) + size
    return base, [layers[index] for index in sorted(layers)]


def _layers_within(base: int, layers: Sequence[int], budget: int, dtype: str) -> int:
    width: Any = _DTYPES[dtype].itemsize
    sizes = np.cumsum([base, *layers]) * width
    return int((sizes <= budget).sum()) - 1
