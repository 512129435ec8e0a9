"""What a dataset's samples depend on, as one key: whatever is kept on disk of them carries it in its name."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .agreement import choose_template, template_variables
from .config import DataConfig
from .sources import open_source
from .summary import DataError
from .templates import TemplateError

#: Raised whenever the same rows would give other ids or masks than before.
RULES = 3
# These change the order or the place of samples, never a sample; the template counts by its text.
_NOT_PART = (
    "path", "shuffle", "seed", "packing", "row_length", "verify_template", "template", "markers", "min_retention",
    "prepared",
)  # fmt: skip


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
    return key_of(way_facts(config, tokenizer, vocab_size) | {"data": data_facts(config)})


def key_of(facts: Mapping[str, Any]) -> str:
    """The hash of facts, JSON values."""
    return _sha256(json.dumps(facts, sort_keys=True).encode())


def way_facts(config: DataConfig, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """What decides how data become samples, whatever the data: plain JSON values by name."""
    options = {f"data.{key}": value for key, value in dataclasses.asdict(config).items() if key not in _NOT_PART}
    return json.loads(
        json.dumps(
            {
                "rules": RULES,
                **options,
                "vocabulary size": vocab_size,
                "chat template": _template(config, tokenizer),
                "tokenizer": None if tokenizer is None else _tokenizer(tokenizer),
            },
            default=str,
        )
    )


def data_facts(config: DataConfig) -> list[Any]:
    """The content of the data: names and hashes of files, or the hub dataset with its revision.

    Raises:
        DataError: see `dataset_key`.
    """
    source = open_source(config.path)
    if source.root is None:
        if not re.search(r"[?&]revision=[0-9a-f]{40}(&|$)", source.path):
            raise DataError(
                f"data.path {source.path} may change at any time; add &revision=COMMIT, the 40 digits of a commit, to"
                " keep work by it"
            )
        return [source.path]
    return [[part, _file_sha256(source.root / part)] for part in source.parts]


def _tokenizer(tokenizer: Any) -> str:
    """Hash of a tokenizer, without the truncation and padding that its last caller asked for."""
    facts = json.loads(tokenizer.backend_tokenizer.to_str())
    return _sha256(json.dumps({**facts, "truncation": None, "padding": None}).encode())


def _template(config: DataConfig, tokenizer: Any) -> str | None:
    """Hash of the text of the template in use and of the tokenizer's own, which rows are compared with."""
    if tokenizer is None:
        return None
    variables = template_variables(tokenizer, config.enable_thinking, config.template_options, config.date)
    try:
        chosen = choose_template(config.template, tokenizer, variables=variables, markers=config.markers)
    except TemplateError:
        facts = [tokenizer.chat_template]  # rows of ids and plain text need none
    else:
        facts = [tokenizer.chat_template, chosen.source, chosen.family.name if chosen.family else None]
    return _sha256(json.dumps(facts).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
