"""The models' own chat templates, where they are at hand; none of them is part of this repository.

    python -m tests.train.data.own_templates

takes eleven of them from the collection in the source package of llama-cpp-python on PyPI (76 MB) and keeps them
beside the small target, or in $DRAFT_JAX_TEMPLATES. Others can be put there by hand, as NAME.jinja: the names are those
of `family_tokenizers.SPECIAL_TOKENS`.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

PACKAGE = "llama_cpp_python==0.3.36"
#: Our name -> the file in that collection. It holds some templates that llama.cpp changed; these are the models' own.
COLLECTION = {
    "glm-4.6": "GLM-4.6",
    "deepseek-v3.1": "deepseek-ai-DeepSeek-V3.1",
    "deepseek-r1": "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "kimi-k2": "moonshotai-Kimi-K2",
    "minimax-m2": "MiniMax-M2",
    "gpt-oss": "openai-gpt-oss-120b",
    "gemma-4": "google-gemma-4-31B-it",
    "qwen3-coder": "Qwen3-Coder",
    "qwen2.5": "Qwen-Qwen2.5-7B-Instruct",
    "qwen3": "Qwen-Qwen3-0.6B",
    "llama3": "meta-llama-Llama-3.1-8B-Instruct",
}


def folder() -> Path:
    from target_bridge.small_target import default_folder

    return Path(os.environ.get("DRAFT_JAX_TEMPLATES") or default_folder().parent / "chat-templates")


def own_template(name: str) -> str:
    """The jinja text of a model's own template; skips the test where it is not at hand."""
    path = folder() / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"{path} is not here: python -m tests.train.data.own_templates fetches most of them")
    return path.read_text(encoding="utf-8")


def main() -> None:
    target = folder()
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE.partition("==")[0]]
        subprocess.run([*command, "--dest", work, PACKAGE], check=True)
        (package,) = Path(work).glob("*.tar.gz")
        wanted = {f"models/templates/{file}.jinja": name for name, file in COLLECTION.items()}
        with tarfile.open(package) as archive:
            for member in archive:
                name = next((name for end, name in wanted.items() if member.name.endswith(end)), None)
                content = archive.extractfile(member) if name else None
                if content is not None:
                    (target / f"{name}.jinja").write_bytes(content.read())
                    print(target / f"{name}.jinja")


if __name__ == "__main__":
    main()
