#!/usr/bin/env bash
# Processes without any launcher, here two on the CPU of this host, to see that a configuration runs in several:
#   bash examples/launch/by_hand.sh --config configs/smollm2-135m.yaml --run_dir=/tmp/run --train.batch_rows=2
# On several hosts set the same variables in each process; RANK counts host by host, LOCAL_RANK within a host.
set -euo pipefail
export WORLD_SIZE=${WORLD_SIZE:-2} MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-29500}
export LOCAL_WORLD_SIZE=$WORLD_SIZE JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
processes=()
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
  RANK=$rank LOCAL_RANK=$rank draft-jax train "$@" &
  processes+=($!)
done
trap 'kill -TERM "${processes[@]}" 2>/dev/null' TERM INT
code=0
for process in "${processes[@]}"; do
  wait "$process" || code=$?
done
exit "$code"
