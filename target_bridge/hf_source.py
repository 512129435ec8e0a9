"""Reading a Transformers model from a folder or the hub; errors say what is wrong and what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from target_bridge.hf_parts import text_config
from target_bridge.target import TargetError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_REMEDY = "A target folder holds config.json, model.safetensors (or shards with an index) and the tokenizer's files"


def target_config(name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> dict[str, Any]:
    """The text part of a target's config.json as a plain dict, without reading its weights.

    Raises:
        TargetError: not a model; see `load_hf_target`.
    """
    return plain_config(text_config(_load_config(name_or_path, revision, trust_remote_code)))


def plain_config(config: Any) -> dict[str, Any]:
    """A config object as a dict of JSON values."""
    if hasattr(config, "to_json_string"):
        return json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in vars(config).items() if not key.startswith("_")}


def load_model(
    name_or_path: str,
    *,
    dtype: torch.dtype,
    revision: str | None = None,
    trust_remote_code: bool = False,
    check_config: Callable[[Any], object] = lambda config: None,
    first_layers: int | None = None,
) -> nn.Module:
    """Load a causal LM onto the CPU. Every tensor comes from the files; none may be left at its random start.

    Args:
        name_or_path: Folder or hub name.
        dtype: Of all parameters.
        revision: On the hub.
        trust_remote_code: Run the model's own Python code.
        check_config: Called with the config before the weights are read; may raise.
        first_layers: Only so many of its decoder layers, the first ones: a model too large to load whole still
            shows what these give.
    """
    config = _load_config(name_or_path, revision, trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        raise TargetError(f"target {name_or_path} is an encoder-decoder model; a target is a decoder-only causal LM")
    check_config(config)
    if first_layers is not None:
        _cut_layers(text_config(config), first_layers)
    if _is_folder(name_or_path):
        _check_weight_files(Path(name_or_path).expanduser())
    from transformers import AutoModelForCausalLM

    try:
        with _quiet():  # what it would report is checked and said below
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                _location(name_or_path),
                config=config,
                dtype=dtype,
                revision=revision,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise _explain(error, name_or_path, "its weights") from error
    model, loading = loaded
    missing = sorted(loading["missing_keys"])
    if missing:
        raise TargetError(
            f"target {name_or_path}: {len(missing)} tensors of {type(model).__name__} are not in its files, "
            f"e.g. {', '.join(missing[:3])}. They would be random; the model is not complete"
        )
    unexpected = sorted(loading["unexpected_keys"])
    if unexpected and first_layers is None:
        print(
            f"target {name_or_path}: {len(unexpected)} tensors in its files are not used by "
            f"{type(model).__name__}, e.g. {', '.join(unexpected[:3])}"
        )
    return model


def load_tokenizer(name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or hub name.

    Raises:
        TargetError: there is none.
    """
    if _is_folder(name_or_path):
        folder = Path(name_or_path).expanduser()
        if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")) and not any(folder.glob("*.model")):
            raise TargetError(
                f"{name_or_path} has no tokenizer: {_listing(folder)}. Copy tokenizer.json, "
                "tokenizer_config.json and the chat template of the model it was made from into it"
            )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            _location(name_or_path), revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise _explain(error, name_or_path, "its tokenizer") from error


def _cut_layers(config: Any, count: int) -> None:
    """Make a text config describe the first `count` layers: the number, and every list with an entry per layer."""
    whole = config.num_hidden_layers
    for key, value in plain_config(config).items():
        if isinstance(value, list) and len(value) == whole:
            setattr(config, key, value[:count])
    config.num_hidden_layers = count


@contextmanager
def _quiet() -> Iterator[None]:
    """Transformers without its progress bars and reports, restored afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _location(name_or_path: str) -> str:
    return str(Path(name_or_path).expanduser()) if _is_folder(name_or_path) else str(name_or_path)


def _is_folder(name_or_path: str) -> bool:
    return Path(name_or_path).expanduser().is_dir()


def _load_config(name_or_path: str, revision: str | None, trust_remote_code: bool) -> Any:
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        _check_config_file(path)
    elif path.exists():
        raise TargetError(f"target {name_or_path} is a file; give the folder that holds it, or a hub name. {_REMEDY}")
    elif str(name_or_path).startswith(("/", ".", "~")) or not _HUB_NAME.fullmatch(str(name_or_path)):
        raise TargetError(f"target folder {name_or_path} does not exist. {_REMEDY}")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            _location(name_or_path), revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise _explain(error, name_or_path, "its config.json") from error


def _check_config_file(folder: Path) -> None:
    file = folder / "config.json"
    if not file.is_file():
        if (folder / "adapter_config.json").is_file():
            raise TargetError(f"target {folder} is a PEFT adapter; merge it into its base model and save that")
        raise TargetError(
            f"target {folder} is a folder but not a model: it has no config.json ({_listing(folder)}). {_REMEDY}"
        )
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise TargetError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict) or not content.get("model_type"):
        raise TargetError(f"{file} has no model_type, so it does not describe a Transformers model. {_REMEDY}")

    marks = [key for key in ("target_layer_ids", "dflash_config", "dspark_config") if key in content]
    if marks:
        raise TargetError(
            f"target {folder} is a draft, not a target: its config.json has {marks[0]}. Name the model "
            "that it drafts for"
        )


def _check_weight_files(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise TargetError(f"{index} is not an index of shards: {error}") from error
        absent = [shard for shard in shards if not (folder / shard).is_file()]
        if absent:
            raise TargetError(
                f"target {folder}: {len(absent)} of {len(shards)} weight files are missing, e.g. "
                f"{absent[0]}; the download is incomplete, fetch it again"
            )
    elif not (folder / "model.safetensors").is_file():
        pickled = sorted(path.name for path in [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
        raise TargetError(
            f"target {folder} has no model.safetensors ({_listing(folder)}). "
            + (
                f"{pickled[0]} is a pickle, which can run code when read; convert it once with "
                "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)"
                if pickled
                else _REMEDY
            )
        )


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return f"it holds {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}" if names else "it is empty"


def _explain(error: Exception, name_or_path: str, what: str) -> TargetError:
    """Say in our words why Transformers could not read something."""
    where = f"target folder {name_or_path}" if _is_folder(name_or_path) else f"target {name_or_path}"
    if not _is_folder(name_or_path):
        kinds = {type(e).__name__ for e in _chain(error)}
        if kinds & {"GatedRepoError"}:
            return TargetError(
                f"{where}: the hub asks for an accepted licence; accept it there and log in (hf auth login)"
            )
        if kinds & {"RepositoryNotFoundError", "RevisionNotFoundError"}:
            return TargetError(
                f"{where}: there is no such folder here and no such model or revision on the hub (or it is "
                "private: hf auth login)"
            )
        if kinds & {
            "LocalEntryNotFoundError",
            "OfflineModeIsEnabled",
            "ConnectError",
            "ConnectTimeout",
            "ConnectionError",
        }:
            return TargetError(
                f"{where}: there is no such folder here, and the model hub cannot be reached (or "
                "HF_HUB_OFFLINE is set). Give the path of a downloaded model folder, or run where "
                "the hub is reachable"
            )
    first = str(error).strip().split("\n")[0]
    hint = ""
    if "model type" in str(error) or "trust_remote_code" in str(error):
        hint = ". A newer transformers may know this model, or it brings its own code (trust_remote_code)"
    return TargetError(f"{where}: {what} could not be read: {type(error).__name__}: {first}{hint}")


def _chain(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
