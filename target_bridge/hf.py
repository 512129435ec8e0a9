"""A Transformers causal LM as a target: any folder or hub name, on a CPU or a GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from target_bridge.batching import overhead_tokens, pad_right, plan_groups
from target_bridge.hf_attention import without_plans
from target_bridge.hf_check import check_model
from target_bridge.hf_parts import Parts, find_parts, max_length_of, num_layers_of, text_config
from target_bridge.hf_session import HFSession, check_sessions
from target_bridge.hf_source import load_model, load_tokenizer, plain_config
from target_bridge.hf_taps import LayerTaps
from target_bridge.probe_reference import LayerStates, transformers_states
from target_bridge.target import Capture, TargetError, TargetInfo, check_documents, validate_layer_ids

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_hf_target(
    name_or_path: str,
    layer_ids: Sequence[int],
    *,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    max_tokens_per_forward: int | None = None,
    max_length: int | None = None,
) -> HFTarget:
    """Load a causal LM and prove that the draft can rely on it.

    Args:
        name_or_path: A folder written by `save_pretrained`, or a name on the model hub.
        layer_ids: Taps, see `validate_layer_ids`.
        dtype: "float32", "bfloat16", or "auto": bfloat16 on a GPU, float32 on a CPU.
        device: "cpu", "cuda", "cuda:1", or "auto": the current GPU if there is one.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run Python code that comes with the model.
        max_tokens_per_forward: Cells of one padded forward; 16384 on a GPU and 2048 on a CPU when not given.
        max_length: Most tokens of a document; needed only if the config does not say, or to lower it.

    Raises:
        TargetError: no such folder, not a model, no safetensors, weights missing, hub not reachable, taps
            out of range, or a model whose logits are not softmax(head @ last_hidden). Each with its remedy.
    """
    torch_device = pick_device(device)
    if dtype == "auto":
        dtype = "bfloat16" if torch_device.type == "cuda" else "float32"
    if dtype not in _DTYPES:
        raise TargetError(f"target dtype {dtype!r} is not one of auto, {', '.join(_DTYPES)}")
    model = load_model(
        name_or_path,
        dtype=_DTYPES[dtype],
        revision=revision,
        trust_remote_code=trust_remote_code,
        # Before the weights are read: a wrong tap should not cost the loading of 30 GB.
        check_config=lambda config: validate_layer_ids(layer_ids, num_layers_of(text_config(config), name_or_path)),
    )
    return HFTarget(
        model.to(torch_device),
        layer_ids,
        name=str(name_or_path),
        max_tokens_per_forward=max_tokens_per_forward,
        max_length=max_length,
        tokenizer_loader=functools.partial(
            load_tokenizer, name_or_path, revision=revision, trust_remote_code=trust_remote_code
        ),
    )


def pick_device(device: str) -> torch.device:
    """The torch device that a setting means; "auto" is the current GPU, or the CPU without one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise TargetError(f"target device {device!r} is not known to torch; say auto, cpu, cuda or cuda:N") from error
    if picked.type not in ("cpu", "cuda"):
        raise TargetError(f"target device {device!r} is not supported; say auto, cpu, cuda or cuda:N")
    if picked.type == "cuda":
        if not torch.cuda.is_available():
            raise TargetError(f"target device {device!r}: torch {torch.__version__} sees no GPU here; say cpu or auto")
        picked = torch.device("cuda", torch.cuda.current_device() if picked.index is None else picked.index)
        if picked.index >= torch.cuda.device_count():
            raise TargetError(f"target device {device!r}: there are {torch.cuda.device_count()} GPUs here")
    return picked


class HFTarget:
    """A `Target` over a loaded model. Use `load_hf_target` unless you built the model yourself.

    Args:
        model: A causal LM, already on its device; it is frozen and put in eval mode.
        layer_ids: Taps.
        name: For messages and `info`.
        max_tokens_per_forward: See `load_hf_target`.
        max_length: See `load_hf_target`.
        tokenizer_loader: Called once, when `tokenizer` is first read.

    Raises:
        TargetError: see `load_hf_target`.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_ids: Sequence[int],
        *,
        name: str,
        max_tokens_per_forward: int | None = None,
        max_length: int | None = None,
        tokenizer_loader: Any = None,
    ) -> None:
        model.eval().requires_grad_(False)
        config = text_config(model.config)
        num_layers = num_layers_of(config, name)
        layer_ids = validate_layer_ids(layer_ids, num_layers)
        self._model = model
        self._parts = find_parts(model, num_layers, name)
        self._tokenizer_loader = tokenizer_loader
        self._layer_ids = layer_ids
        self._budget = self._pick_budget(max_tokens_per_forward)
        parameters = sum(weight.numel() for weight in model.parameters())
        self._overhead = overhead_tokens(self.device.type, parameters)
        self._tokenizer: Any = None
        self._text_config = config
        self._sessions_checked = False
        dtype = self._parts.embedding.dtype
        self._info = TargetInfo(
            name=name,
            hidden_size=int(config.hidden_size),
            num_layers=num_layers,
            vocab_size=int(config.vocab_size),
            max_length=max_length_of(config, max_length, name),
            layer_ids=layer_ids,
            dtype=str(dtype).removeprefix("torch."),
            config=plain_config(config),
            eos_token_ids=self._find_eos(config),
        )
        check_model(
            model,
            self._parts,
            config,
            self._forward,
            name=name,
            vocab_size=self._info.vocab_size,
            hidden_size=self._info.hidden_size,
            num_taps=len(layer_ids),
            max_length=self._info.max_length,
        )

    @property
    def info(self) -> TargetInfo:
        """Facts about the model."""
        return self._info

    @property
    def parts(self) -> Parts:
        """Its decoder, layers, embedding and head."""
        return self._parts

    @property
    def text_config(self) -> Any:
        """The language model's config object."""
        return self._text_config

    @property
    def budget(self) -> int:
        """Most cells of one padded forward."""
        return self._budget

    @property
    def overhead(self) -> int:
        """Cells of padding that cost as much as one more forward."""
        return self._overhead

    @property
    def device(self) -> torch.device:
        """Where it runs, and where captured states are."""
        return self._parts.embedding.device

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer, loaded on first use.

        Raises:
            TargetError: the folder has none.
        """
        if self._tokenizer is None:
            if self._tokenizer_loader is None:
                raise TargetError(f"target {self._info.name} was made from a bare model and has no tokenizer")
            self._tokenizer = self._tokenizer_loader()
        return self._tokenizer

    def capture(self, documents: Sequence[np.ndarray]) -> Capture:
        """Hidden states of every document; see `target_bridge.target.Target`.

        Documents of similar length share a forward, padded on the right. The states do not depend on who
        shared it, except for the last bits that a matrix product of another shape may round otherwise.

        Returns:
            States in the model's dtype on its device: views into the padded results, not to be written to.

        Raises:
            TargetError: see `check_documents`; nothing has run then.
        """
        checked = check_documents(documents, self._info.vocab_size, self._info.max_length)
        lengths = [len(ids) for ids in checked]
        context: list[Any] = [None] * len(checked)
        last: list[Any] = [None] * len(checked)
        for group in plan_groups(lengths, self._budget, self._overhead):
            ids = torch.as_tensor(pad_right([checked[index] for index in group]), device=self.device)
            taps, final = self._forward(ids)
            if taps.shape[:2] != ids.shape or final.shape[:2] != ids.shape:
                raise TargetError(
                    f"target {self._info.name} returned states {tuple(taps.shape)} and {tuple(final.shape)} "
                    f"for {tuple(ids.shape)} ids"
                )
            for row, index in enumerate(group):
                context[index] = taps[row, : lengths[index]]
                last[index] = final[row, : lengths[index]]
        return Capture(context_hidden=context, last_hidden=last)

    def open_session(self, max_length: int, max_sequences: int = 1) -> HFSession:
        """A fresh decoding session of `max_sequences` texts of at most `max_length` tokens each.

        Raises:
            TargetError: too long for the model, a model that keeps a recurrent state instead of a KV cache, or one
                that does not decode with a cache as it does without (checked on first use).
        """
        if getattr(self._model, "_is_stateful", False):
            raise TargetError(
                f"target {self._info.name} ({type(self._model).__name__}) keeps a recurrent state, from "
                "which rejected tokens cannot be taken back; it can be captured for training, not evaluated"
            )
        session = HFSession(self, max_length, max_sequences)
        if not self._sessions_checked:
            check_sessions(self)
            self._sessions_checked = True
        return session

    def frozen_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(embedding [V', D], LM head [V', D]): the model's own memory; one object twice when tied."""
        return self._parts.embedding, self._parts.head

    @property
    def model(self) -> nn.Module:
        """The Transformers model itself, for those who compare with it."""
        return self._model

    def own_logits(self, documents: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """[V'] per document: the logits after its last token, by the model's own head and whatever it does to them."""
        checked = check_documents(documents, self._info.vocab_size, self._info.max_length)
        with torch.inference_mode():
            return [
                self._model(input_ids=torch.as_tensor(ids, device=self.device)[None], use_cache=False).logits[0, -1]
                for ids in checked
            ]

    def layer_states(self, documents: Sequence[np.ndarray]) -> LayerStates:
        """Every layer's output on each document, by Transformers itself; see `target_bridge.probe`."""
        return transformers_states(self._model, documents, num_layers=self._info.num_layers)

    def _forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [R, T] -> (taps [R, T, M*D], last_hidden [R, T, D]). The LM head does not run."""
        recorder = LayerTaps(self._parts.layers, self._layer_ids)
        with torch.inference_mode(), without_plans(self.device), recorder as taps:
            output = self._parts.decoder(input_ids=ids, use_cache=False)
            return taps.take(), output.last_hidden_state

    def _find_eos(self, config: Any) -> tuple[int, ...]:
        generation = getattr(self._model, "generation_config", None)
        found = getattr(generation, "eos_token_id", None)
        if found is None and self._tokenizer_loader is not None:
            with contextlib.suppress(TargetError):  # whoever needs the tokenizer will be told
                found = self.tokenizer.eos_token_id
        if found is None:
            found = getattr(config, "eos_token_id", None)
        if found is None:
            return ()
        return tuple(dict.fromkeys(int(i) for i in (found if isinstance(found, (list, tuple)) else [found])))

    def _pick_budget(self, asked: int | None) -> int:
        if asked is None:
            return 16384 if self.device.type == "cuda" else 2048
        if asked < 1:
            raise TargetError(f"max_tokens_per_forward must be at least 1, got {asked}")
        return asked
