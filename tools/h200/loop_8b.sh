#!/usr/bin/env bash
# The whole loop at real size on one GPU: a Qwen3-8B target with random weights (load_format dummy, from its config
# alone) in SGLang, its DSpark draft, rows of 4096 tokens; the last step is recorded by JAX's profiler.
#   loop_8b.sh             needs wheels and bundle (serve_check.sh unpack), no target files
# Prints a line {"part": "loop_8b", ...}; the lines of benchmarks.loop go to $OUT/loop_8b.jsonl, the log to $OUT/loop_8b.log.
#   SHAPE=tiny LENGTH=64 DEVICE=cpu is a dry run; ROWS rows a micro-step, WINDOW micro-steps a step, STEPS steps.
set -uo pipefail
cd "$(dirname "$0")/../.."
W=${WORK:-/tmp/serve}; B=${BUNDLE:-/tmp/sglang_bundle}; OUT=${OUT:-$W/out}; mkdir -p "$OUT" "$W"
SHAPE=${SHAPE:-qwen3-8b} LENGTH=${LENGTH:-4096} DEVICE=${DEVICE:-cuda} ROWS=${ROWS:-1} WINDOW=${WINDOW:-8} STEPS=${STEPS:-9}
NAME=loop_8b${ROWS:+_$ROWS}; FOLDER=$W/shape_$SHAPE
export PYTHONPATH=$B/transformers:$B/rest:${EXTRA_PATH:+$EXTRA_PATH:}${SITE:-/tmp/site}:$PWD
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 SGLANG_ENABLE_JIT_DEEPGEMM=0
MASK=151669; [ "$SHAPE" = tiny ] && MASK=500
[ -s "$FOLDER/rows.jsonl" ] || python3 -m benchmarks.dummy_target --shape "$SHAPE" --rows 256 --length "$LENGTH" "$FOLDER"
rm -rf "$W/$NAME"; code=0
timeout -s TERM "${LOOP_SECONDS:-240}" python3 -m benchmarks.loop --skip=3 --profile="$W/$NAME/trace" \
  --config configs/qwen3-8b.yaml --run_dir="$W/$NAME/run" --resume=never \
  --target.path="$FOLDER" --target.bridge=sglang --target.sglang.load_format=dummy --target.probe=false --target.device="$DEVICE" \
  --data.path="$FOLDER/rows.jsonl" --data.format=tokens --data.max_length="$LENGTH" --draft.mask_token_id=$MASK \
  --train.epochs=null --train.steps="$STEPS" --train.batch_rows="$ROWS" --train.accumulation="$WINDOW" --train.memory_fraction=0.4 \
  --checkpoint.every=0 --checkpoint.keep_best=0 --logging.progress=false ${LOOP_ARGS:-} \
  > "$OUT/$NAME.jsonl" 2> "$OUT/$NAME.log" || code=$?
cp "$W/$NAME/run/metrics.jsonl" "$OUT/${NAME}_metrics.jsonl" 2> /dev/null
grep '^{' "$OUT/$NAME.jsonl" || { tail -4 "$OUT/$NAME.jsonl"; tail -12 "$OUT/$NAME.log" | cut -c1-400; }
printf '{"part": "%s", "s": %d, "exit_code": %d}\n' "$NAME" "$SECONDS" "$code"
exit $code
