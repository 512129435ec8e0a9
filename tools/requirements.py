"""What pyproject.toml asks for, one requirement a line: `python tools/requirements.py quickstart,dev`.

Lets the install scripts fetch everything without building the project, so that two environments can be made at once:
building writes into the source folder.
"""

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """The dependencies of the project and of some of its extras.

    Raises:
        SystemExit: no such extra.
    """
    project = tomllib.loads(PROJECT.read_text())["project"]
    known = project["optional-dependencies"]
    for name in extras:
        if name not in known:
            sys.exit(f"{PROJECT} has no extra {name!r}; it has: {', '.join(sorted(known))}")
    return project["dependencies"] + [line for name in extras for line in known[name]]


if __name__ == "__main__":
    print("\n".join(requirements([name for name in sys.argv[1].split(",") if name])))
