"""The direction of imports: train -> target_bridge -> draft_jax (for the batch type only); nothing the other way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("draft_jax", "target_bridge", "train")
TORCH_SIDE = {"torch", "transformers", "sglang", "accelerate"}
#: package -> first-party modules it may import beside its own.
ALLOWED = {
    "draft_jax": (),
    "target_bridge": ("draft_jax.batch",),
    "train": ("draft_jax", "target_bridge"),
}


def imported_modules(path: Path) -> set[str]:
    """Absolute dotted names a source file imports anywhere, functions and TYPE_CHECKING blocks included."""
    package = path.relative_to(ROOT).with_suffix("").parts
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_direction_of_imports(path):
    package = path.relative_to(ROOT).parts[0]
    for name in imported_modules(path):
        if name.split(".")[0] in PACKAGES and not within(name, package):
            assert any(within(name, allowed) for allowed in ALLOWED[package]), f"{path}: imports {name}"
        if package == "draft_jax":
            assert name.split(".")[0] not in TORCH_SIDE, f"{path}: draft_jax is pure JAX, yet imports {name}"


def test_every_package_has_sources():
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_is_cheap(package):
    """`import train` must not load torch, transformers or start a JAX backend: environment comes first."""
    code = (
        f"import sys, {package}; heavy = [m for m in ('torch', 'transformers', 'wandb', 'tensorboardX', 'matplotlib')"
        " if m in sys.modules]; assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
