"""Reading and writing a run's configuration: YAML, then dotted overrides, then the checked dataclasses.

draccus turns plain values into the dataclasses; what it lets pass (an unknown key deep in a file named without its
path, a key given twice, `true` where a number belongs) is refused here first, with the dotted path of the key.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import draccus
import yaml

from .config import ConfigError, RunConfig


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (YAML silently keeps the last)."""

    def construct_mapping(self, node, deep=False):
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"{self.name}, line {key_node.start_mark.line + 1}: key {key!r} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file of nested keys. Raises ConfigError if it is missing, no YAML or no mapping."""
    try:
        with open(path, encoding="utf-8") as stream:
            tree = yaml.load(stream, _StrictLoader)
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror or error})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: is not YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {path}: holds a {type(tree).__name__}, expected keys such as `target:`")
    return tree


def apply_override(tree: dict[str, Any], key: str, text: str) -> None:
    """Set dotted `key` in `tree` to `text` read as a YAML value, in place."""
    try:
        value = yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--{key}={text}: the value is not YAML: {error}") from error
    *parents, leaf = key.split(".")
    for depth, parent in enumerate(parents):
        child = tree.get(parent)
        if child is None:
            child = tree[parent] = {}
        if not isinstance(child, dict):
            path = ".".join(parents[: depth + 1])
            raise ConfigError(f"--{key}: {path} already has the value {child!r}, it holds no keys")
        tree = child
    tree[leaf] = value


def build(tree: Mapping[str, Any], config_class: type = RunConfig) -> Any:
    """Make the dataclass from nested plain values.

    Raises:
        ConfigError: an unknown or missing key or a value of another type, named by its dotted path.
    """
    _check_keys(tree, config_class, ())
    try:
        return draccus.decode(config_class, dict(tree))
    except draccus.utils.DraccusException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError) and str(error).startswith("Couldn't instantiate"):
            raise ConfigError(str(cause)) from cause  # the dataclass's own check: it names the key itself
        raise ConfigError(" ".join(str(error).split())) from error


def load_config(path: str | Path | None = None, overrides: Sequence[tuple[str, str]] = ()) -> RunConfig:
    """Read a run's configuration: YAML file, then `(dotted key, value)` overrides, then checks."""
    tree = read_yaml(path) if path is not None else {}
    for key, text in overrides:
        apply_override(tree, key, text)
    return build(tree)


def dump(config: Any) -> str:
    """The configuration as YAML text that :func:`load_config` reads back to an equal object."""
    return yaml.safe_dump(draccus.encode(config), sort_keys=False, allow_unicode=True)


def dataclass_of(hint: Any) -> type | None:
    """The dataclass inside a type hint (`X` or `X | None`), or None."""
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    return next((t for t in options if dataclasses.is_dataclass(t) and isinstance(t, type)), None)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _check_keys(tree: Any, config_class: type, path: tuple[str, ...]) -> None:
    hints = typing.get_type_hints(config_class)
    names = [f.name for f in dataclasses.fields(config_class) if f.init]
    here = ".".join(path)
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{here} is {tree!r}; it holds the keys {', '.join(names)}")
    for key, value in tree.items():
        dotted = ".".join((*path, str(key)))
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {'.'.join((*path, near[0]))}?" if near else f"known keys: {', '.join(names)}"
            raise ConfigError(f"unknown key {dotted}; {hint}")
        inner = dataclass_of(hints[key])
        if inner is not None and not (value is None and _is_union(hints[key])):
            _check_keys(value, inner, (*path, key))
        options = typing.get_args(hints[key]) if _is_union(hints[key]) else (hints[key],)
        if isinstance(value, bool) and bool not in options and inner is None:
            raise ConfigError(f"{dotted} is {value!r}; expected {type_name(hints[key])}")
        if value is None and inner is None and type(None) not in options:
            raise ConfigError(f"{dotted} is null; expected {type_name(hints[key])}")
    required = (
        f.name
        for f in dataclasses.fields(config_class)
        if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    for name in required:
        if name not in tree:
            missing = ".".join((*path, name))
            inner = dataclass_of(hints[name])
            if inner is not None:
                _check_keys({}, inner, (*path, name))
            else:
                raise ConfigError(f"missing key {missing} ({type_name(hints[name])})")


def type_name(hint: Any) -> str:
    """A type hint as a reader would write it."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
