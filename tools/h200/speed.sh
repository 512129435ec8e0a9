#!/usr/bin/env bash
# Every measurement of benchmarks/RESULTS.md on one H200, most wanted first; needs no wheels, no target.
#   speed.sh               JSON lines to $OUT/speed_PART.jsonl, logs beside them, growth.png and .jsonl to $OUT
# PARTS="kernels step shapes attention grow" chooses; PART_SECONDS is each part's limit. About four minutes in all.
# SIZES="--shape smollm2 --vocab 128 ..." LENGTHS="32 16" is a dry run on a CPU.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-/tmp/speed}; mkdir -p "$OUT"
SIZES=${SIZES:-} LENGTHS=${LENGTHS:-1024 2048 4096} PARTS=${PARTS:-kernels step shapes attention grow}
export PYTHONUNBUFFERED=1 JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$OUT/../programs}
failed=0
part() { # NAME COMMAND...
  local name=$1 begin=$SECONDS code=0; shift
  timeout -k 10 "${PART_SECONDS:-150}" "$@" >> "$OUT/speed_$name.jsonl" 2>> "$OUT/speed_$name.log" || code=$?
  [ $code -eq 0 ] || { failed=1; tail -n 5 "$OUT/speed_$name.log" | cut -c1-300; }
  printf '{"part": "%s", "s": %d, "exit_code": %d}\n' "$name" $((SECONDS - begin)) $code
}
step() { local name=$1; shift; part "$name" python3 -m benchmarks.step --repeats 8 "$@" $SIZES; }
for wanted in $PARTS; do
  case $wanted in
    kernels) DRAFT_JAX_TEST_GPU=1 part kernels python3 -m pytest -q -p no:cacheprovider tests/train/test_fused_update.py ;;
    step) step step --length $LENGTHS ;;
    shapes)
      for shape in glm-5.2 qwen3-4b; do part shapes python3 -m benchmarks.step --repeats 8 --length ${LENGTHS##* } --shape $shape $SIZES; done
      step shapes --length ${LENGTHS##* } --rematerialise
      step shapes --length ${LENGTHS%% *} --fused
      step shapes --length ${LENGTHS%% *} --xla xla_gpu_dot_merger_threshold_mb=0 ;;
    attention) part attention python3 -m benchmarks.attention --length $LENGTHS $SIZES ;;
    grow) part grow python3 -m benchmarks.grow --out "$OUT/growth.png" --fast-compile --repeats 6 ${GROW:-} $SIZES ;;
    *) echo "no part $wanted" >&2; exit 2 ;;
  esac
done
exit $failed
