#!/usr/bin/env bash
# All GPUs of one host, one process each:   bash examples/launch/one_host.sh --config configs/qwen3-8b.yaml --run_dir=runs/a
# Started again with the same arguments it continues from the last complete checkpoint.
set -euo pipefail
GPUS=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
exec torchrun --standalone --nproc-per-node="$GPUS" -m train.cli train --resume auto "$@"
