#!/usr/bin/env bash
# Several hosts without a batch system: run this on every one, with the same arguments but NODE_RANK.
#   FIRST_HOST=10.0.0.1 NODES=4 NODE_RANK=0 bash examples/launch/each_host.sh --config ... --run_dir=/shared/runs/a
# Ports PORT (torch) and PORT + 1 (JAX) of the first host must be reachable from all, and run_dir must be shared.
set -euo pipefail
: "${FIRST_HOST:?name or address of the host with NODE_RANK 0}" "${NODES:?number of hosts}" "${NODE_RANK:?0 .. NODES-1}"
GPUS=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
PORT=${PORT:-29500}
exec torchrun --nnodes="$NODES" --node-rank="$NODE_RANK" --nproc-per-node="$GPUS" \
  --master-addr="$FIRST_HOST" --master-port="$PORT" -m train.cli train --resume auto "$@"
