"""What the documents name exists: files they link to, headings, commands with their options, modules, make targets."""

import contextlib
import functools
import io
import re
from pathlib import Path

import pytest

from train import cli

ROOT = Path(__file__).resolve().parent.parent
OURS = ("docs", "benchmarks", "configs", "examples", "tests", "tools", "draft_jax", "target_bridge", "train")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in OURS for path in (ROOT / folder).rglob("*.md"))])
#: `draft-jax NAME ...` or `-m train.cli NAME ...`, up to the end of the line, of the inline code or of the command.
COMMAND = re.compile(r"(?:(?<![\w/.-])draft-jax|-m train\.cli) +([a-z][\w-]*)([^`|;&\n]*)")
OPTION = re.compile(r"(?<![\w-])--([A-Za-z][\w.-]*)")


def code_of(text: str) -> str:
    """Fenced blocks and inline code of a document, one piece a line; lines continued by a backslash are one."""
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    lines = "\n".join([*fenced, *inline]).replace("\\\n", " ").splitlines()
    return "\n".join(re.sub(r"(?:^|\s)#.*", "", line) for line in lines)


def headings(path: Path) -> set[str]:
    """Anchors of a document as GitHub makes them."""
    lines = re.findall(r"^#+ +(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.strip().lower()).replace(" ", "-") for line in lines}


def broken_links(path: Path) -> list[str]:
    bad = []
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists():
            bad.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in headings(target):
            bad.append(f"{link}: no such heading")
    return bad


@functools.cache
def options_of(command: str) -> frozenset[str]:
    """Every option a command's --help names, configuration keys included."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    text = said.getvalue()
    named = set(OPTION.findall(text))
    if "KEY.KEY" in named or "keys are those of" in text.lower():
        with contextlib.redirect_stdout(keys := io.StringIO()), contextlib.suppress(SystemExit):
            cli.main(["train", "--help"])
        named |= set(re.findall(r"(?m)^ *(?:--)?([a-z]\w*(?:\.\w+)*)", keys.getvalue()))
    return frozenset({*named, "debug", "help"})


def wrong_commands(code: str) -> list[str]:
    bad = []
    for command, arguments in COMMAND.findall(code):
        if command not in cli._COMMANDS:
            bad.append(f"draft-jax {command}: no such command")
            continue
        known = options_of(command)
        bad += [
            f"draft-jax {command} --{name}: no such option" for name in OPTION.findall(arguments) if name not in known
        ]
    return bad


def missing_modules(code: str) -> list[str]:
    """Of `python -m` with a package of this repository."""
    bad = []
    for module in re.findall(r"python3? -m ((?:train|target_bridge|draft_jax|benchmarks|tests|tools)(?:\.\w+)*)", code):
        base = ROOT.joinpath(*module.split("."))
        if not (base.with_suffix(".py").is_file() or (base / "__main__.py").is_file()):
            bad.append(f"python -m {module}: no such program")
    return bad


def missing_targets(code: str) -> list[str]:
    known = set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?m)(?:^|(?<=\s))make ([a-z][\w-]*)", code)
    return [f"make {name}: no such target" for name in named if name not in known]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_named_exists(path):
    code = code_of(path.read_text(encoding="utf-8"))
    assert broken_links(path) + wrong_commands(code) + missing_modules(code) + missing_targets(code) == []


def test_the_usage_names_every_command():
    named = re.findall(r"(?m)^  ([a-z][\w-]*)  ", cli.USAGE)
    assert sorted(named) == sorted(cli._COMMANDS)


def test_the_checks_see_what_is_wrong(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n[here](#a-heading) [gone](#no) [file](missing.md) [far](https://example.org/x)\n"
        "```bash\ndraft-jax trane\ndraft-jax train --config a \\\n  --optimizer.rl=1 --optimizer.lr 2  # --no\n"
        "draft-jax eval x --nothing | tool --its-own\npython -m benchmarks.gone\nmake tost\n```\n`make test`\n"
    )
    assert broken_links(page) == ["#no: no such heading", "missing.md: no such file"]
    code = code_of(page.read_text())
    assert wrong_commands(code) == [
        "draft-jax trane: no such command",
        "draft-jax train --optimizer.rl: no such option",
        "draft-jax eval --nothing: no such option",
    ]
    assert missing_modules(code) == ["python -m benchmarks.gone: no such program"]
    assert missing_targets(code) == ["make tost: no such target"]
