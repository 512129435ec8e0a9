#!/usr/bin/env bash
# Install draft-jax into a virtual environment: tools/install.sh VENV EXTRAS
# torch goes first and alone, because what pip picks for it depends on the machine: with an NVIDIA GPU the CUDA build,
# without one a CPU build wherever pip can see one (a wheel directory, an index, PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL).
set -euo pipefail
venv=$1
extras=$2
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "draft-jax needs Python 3.11 or newer; $python is $("$python" -V 2>&1). Set PYTHON=/path/to/python3.11" >&2
    exit 1
}
. tools/pip.sh

if nvidia-smi -L >/dev/null 2>&1; then
    extras="$extras,cuda13"
elif ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    # Ask pip what it would take before it takes several GB.
    build=$(pip install --dry-run --quiet --no-deps --ignore-installed --report - -c constraints.txt torch 2>/dev/null |
        "$venv/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["download_info"]["url"])' || true)
    case "$build" in
    *cpu*) ;;
    *) [ "$(uname -sm)" != "Linux x86_64" ] ||
        echo "No CPU build of torch is visible to pip, so a CUDA build of several GB follows. Point PIP_FIND_LINKS or" \
            "PIP_EXTRA_INDEX_URL at one to avoid it." >&2 ;;
    esac
fi
echo "Installing torch into $venv"
pip_install -c constraints.txt torch
echo "Installing draft-jax[$extras] into $venv"
install_project "$extras" -c constraints.txt
