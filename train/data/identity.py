"""What a dataset's samples depend on, as one key: whatever is kept on disk of them carries it in its name."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from .agreement import choose_template, template_variables
from .config import DataConfig
from .sources import open_source
from .summary import DataError
from .templates import TemplateError

#: Raised whenever the same rows would give other ids or masks than before.
RULES = 2
# These change the order or the place of samples, never a sample; the template counts by its text.
_NOT_PART = ("path", "shuffle", "seed", "packing", "row_length", "verify_template", "template", "markers")


def dataset_key(config: DataConfig, tokenizer: Any, vocab_size: int) -> str:
    """A hash of all that decides what the samples are: rules, options, template, tokenizer, content of the data.

    Files count by their names and content, so that a copy elsewhere has the same key; a hub dataset by its name and
    revision.

    Args:
        config: what to read and how.
        tokenizer: of the target, or None for rows of ids.
        vocab_size: of the target.

    Raises:
        DataError: the data cannot be read, or is a hub dataset without a revision, which may change at any time.
    """
    digest = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        digest.update(json.dumps([name, value], sort_keys=True, default=str).encode())

    options = {key: value for key, value in dataclasses.asdict(config).items() if key not in _NOT_PART}
    add("rules", RULES)
    add("options", options)
    add("vocab_size", vocab_size)
    add("template", _template(config, tokenizer))
    add("tokenizer", None if tokenizer is None else _sha256(tokenizer.backend_tokenizer.to_str().encode()))
    source = open_source(config.path)
    if source.root is None:
        if "revision=" not in source.path:
            raise DataError(f"data.path {source.path} may change at any time; add &revision=COMMIT to keep work by it")
        add("source", source.path)
        return digest.hexdigest()
    for part in source.parts:
        add("file", [part, _file_sha256(source.root / part)])
    return digest.hexdigest()


def _template(config: DataConfig, tokenizer: Any) -> Any:
    """Text of the template in use and of the tokenizer's own, which rows are compared with."""
    if tokenizer is None:
        return None
    variables = template_variables(tokenizer, config.enable_thinking, config.template_options, config.date)
    try:
        chosen = choose_template(config.template, tokenizer, variables=variables, markers=config.markers)
    except TemplateError:
        return [tokenizer.chat_template]  # rows of ids and plain text need none
    return [tokenizer.chat_template, chosen.source, chosen.family.name if chosen.family else None]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
