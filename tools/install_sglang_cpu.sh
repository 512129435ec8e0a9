#!/usr/bin/env bash
# A virtual environment with draft-jax and the real SGLang, to run tests/sglang on a CPU: install_sglang_cpu.sh VENV [VERSION]
# Not for a GPU: docs/sglang.md says how SGLang is installed there. About 2.5 GB.
set -euo pipefail
venv=$1
version=${2:-0.5.23}
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."
pins=tools/sglang_cpu/$version.txt
[ -f "$pins" ] || {
    echo "SGLang $version: no such list as $pins; known: $(cd tools/sglang_cpu && echo 0*.txt)" >&2
    exit 1
}
. tools/pip.sh

echo "Installing SGLang $version for the CPU into $venv"
# torch first and alone: which build pip picks depends on the machine (tools/install.sh).
pip_install -c "$pins" torch
install_project dev -c "$pins" torch -r tools/sglang_cpu/requirements.txt
# Without dependencies: SGLang pins another torch and asks for CUDA kernels, and so do these two.
pip_install --no-deps -c "$pins" "sglang==$version" torchvision xgrammar
