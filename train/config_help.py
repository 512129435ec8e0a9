"""The table of configuration keys for `--help`, made from the dataclasses and their docstrings."""

import dataclasses
import inspect
import re
import textwrap
import typing
from typing import Any

from .config import RunConfig
from .config_file import dataclass_of, type_name


def key_table() -> str:
    """Every key with its type, default and meaning, grouped as in the YAML file."""
    return "\n".join(_section(RunConfig, "")) + "\n"


def _section(config_class: type, prefix: str) -> list[str]:
    hints = typing.get_type_hints(config_class)
    meanings = attribute_docs(config_class)
    lines, inner = [], []
    for field in dataclasses.fields(config_class):
        nested = dataclass_of(hints[field.name])
        if nested is not None:
            inner += ["", f"{prefix}{field.name}:", *_section(nested, f"{prefix}{field.name}.")]
            continue
        lines.append(f"  --{prefix}{field.name}  {type_name(hints[field.name])}, {_default(field)}")
        lines += textwrap.wrap(meanings.get(field.name, ""), 104, initial_indent="      ", subsequent_indent="      ")
    return lines + inner


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"default {field.default!r}"
    return "required"


def attribute_docs(config_class: type) -> dict[str, str]:
    """Meaning of each field, from the `Attributes:` part of a class's Google-style docstring."""
    text = inspect.cleandoc(config_class.__doc__ or "").partition("Attributes:")[2]
    docs: dict[str, str] = {}
    name = None
    for line in textwrap.dedent(text.strip("\n")).splitlines():
        start = re.match(r"(\w+): (.*)", line)
        if start:
            name = start[1]
            docs[name] = start[2]
        elif name and line.strip():
            docs[name] += " " + line.strip()
    return docs
