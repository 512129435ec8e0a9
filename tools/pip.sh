# Sourced by the install scripts, in the root of the checkout, $python and $venv being set: makes the environment.
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# Byte code is left to the first import: most of the ten thousand modules of torch and transformers are never imported.
pip_install() { pip install --quiet --no-compile "$@"; }

# What pyproject.toml asks for (its extras: $1), with further arguments of pip; then the project itself, editable.
# Building it writes into the checkout, so the lock lets `make -j` do that for one environment at a time.
install_project() {
    local wanted
    wanted=$("$venv/bin/python" tools/requirements.py "$1")
    pip_install "${@:2}" -r <(echo "$wanted")
    "$venv/bin/python" -c '
import fcntl, subprocess, sys
with open("pyproject.toml") as project:
    fcntl.flock(project, fcntl.LOCK_EX)
    sys.exit(subprocess.call([sys.executable, "-m", "pip", *sys.argv[1:]]))
' --disable-pip-version-check install --quiet --no-deps -e .
}
