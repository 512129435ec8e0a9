#!/usr/bin/env bash
# Two H200s of one host: the same run with one GPU, with two targets (dp = 2) and with one target over both (tp = 2) at
# the same global batch in float32, then SGLang's and JAX's collectives in turn.
#   two_gpus.sh               needs wheels and bundle (serve_check.sh unpack), no target files
# One JSON line per part; losses to $OUT/losses.json, logs to $OUT. DEVICE=cpu is a dry run (STEPS, TURNS, LENGTH smaller).
# PARTS="single dp tp compare turns" chooses. NVLink multicast stays off (NCCL_NVLS_ENABLE=0).
set -uo pipefail
cd "$(dirname "$0")/../.."
W=${WORK:-/tmp/two}; B=${BUNDLE:-/tmp/sglang_bundle}; OUT=${OUT:-$W/out}; mkdir -p "$OUT" "$W"
DEVICE=${DEVICE:-cuda} STEPS=${STEPS:-300} COMPARED=${COMPARED:-50} TURNS=${TURNS:-1000} LENGTH=${LENGTH:-256} DTYPE=${DTYPE:-float32}
PARTS=${PARTS:-single dp tp compare turns} TARGET=$W/target
export PYTHONPATH=$B/transformers:$B/rest:${EXTRA_PATH:+$EXTRA_PATH:}${SITE:-/tmp/site}:$PWD
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 SGLANG_ENABLE_JIT_DEEPGEMM=0 NCCL_NVLS_ENABLE=0
cores() { [ "$DEVICE" != cpu ] || export SGLANG_CPU_OMP_THREADS_BIND=$1; } # as many as ranks of a target, which SGLang insists on
begin=$SECONDS; failed=0
say() { printf '{"part": "%s", "s": %d%s}\n' "$1" $((SECONDS - begin)) "${2:+, $2}"; }
[ -s "$TARGET/rows.jsonl" ] || JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES= python3 tools/h200/random_target.py "$TARGET" --heads 8 --kv-heads 4 \
  --length "$LENGTH" > "$OUT/random_target.log" 2>&1 || { tail -3 "$OUT/random_target.log"; exit 1; }
say random_target
RANKS=(python3 -m torch.distributed.run --nproc-per-node 2 --master-addr 127.0.0.1 --master-port)
train() { # NAME LAUNCHER... -- OPTIONS
  local name=$1 code=0 launcher=(); shift
  while [ "$1" != -- ]; do launcher+=("$1"); shift; done; shift
  rm -rf "$W/$name"
  timeout -k 20 "${PART_SECONDS:-180}" "${launcher[@]}" -m train.cli train --run_dir="$W/$name" --target.path="$TARGET" --target.bridge=sglang \
    --target.device="$([ "$DEVICE" = cpu ] && echo cpu || echo auto)" --target.dtype="$DTYPE" --target.probe=false --train.dtype="$DTYPE" \
    --data.path="$TARGET/rows.jsonl" --data.format=tokens --data.max_length="$LENGTH" --data.min_retention=0.5 \
    --draft.layers=2 --draft.target_layer_ids=[1,8,15,22,28] --draft.mask_token_id=18 --draft.markov_rank=64 --objective.num_anchors=32 \
    --train.epochs=null --train.steps="$STEPS" --train.batch_rows=8 --train.memory_fraction=0.2 --checkpoint.every=0 --checkpoint.keep_best=0 \
    --logging.progress=false "$@" > "$OUT/$name.log" 2>&1 || code=$?
  [ $code -eq 0 ] || { failed=1; grep -E 'Error|draft-jax train:|rank [0-9]' "$OUT/$name.log" | tail -n 6 | cut -c1-400; }
  say "$name" "\"exit_code\": $code, \"steps\": $(cat "$W/$name/metrics.jsonl" 2> /dev/null | wc -l), \"ms_per_step\": $(tail -n 1 "$W/$name/metrics.jsonl" 2> /dev/null \
    | python3 -c 'import json, sys; print(round(1e3 * json.loads(sys.stdin.read())["seconds_per_step"], 1))' 2> /dev/null || echo null)"
}
for part in $PARTS; do
  case $part in
    single) cores 0; train single python3 -- --train.stop_at="$COMPARED" ;;
    dp) cores 0; train dp "${RANKS[@]}" 29611 -- ;;
    tp) cores "0|1"; train tp "${RANKS[@]}" 29612 -- --target.sglang.tp_size=2 ;;
    compare) python3 - "$W" "$COMPARED" "$STEPS" "$OUT/losses.json" <<'P' || failed=1
import json, sys
folder, compared, steps, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
def losses(name):
    try:
        return [json.loads(line)["loss"] for line in open(f"{folder}/{name}/metrics.jsonl")]
    except OSError:
        return []
found = {name: losses(name) for name in ("single", "dp", "tp")}
json.dump(found, open(out, "w"))
ok = len(found["single"]) >= compared
for name in ("dp", "tp"):
    pairs = list(zip(found["single"][:compared], found[name][:compared]))
    gap = max((abs(a - b) for a, b in pairs), default=float("nan"))
    good = len(pairs) == compared and gap < 1e-3 and len(found[name]) == steps
    ok = ok and good
    print(json.dumps({"part": f"losses_{name}", "ok": good, "compared": len(pairs), "largest_difference": gap, "steps": len(found[name])}))
sys.exit(not ok)
P
      ;;
    turns) cores "0|1"; timeout -k 20 "${PART_SECONDS:-180}" "${RANKS[@]}" 29613 \
      tools/h200/sglang_tp_smoke.py "$TARGET" --turns "$TURNS" --device "$DEVICE" > "$OUT/turns.log" 2>&1 || { failed=1; tail -6 "$OUT/turns.log" | cut -c1-400; }
      grep '^{' "$OUT/turns.log" ;;
  esac
done
say done "\"failed\": $failed"; exit $failed
