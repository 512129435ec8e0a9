#!/usr/bin/env bash
# serve-check on an H200 without network: stock SGLang 0.5.16 from tools/sglang_bundle, the public DeepSpec draft of
# SmolLM2, then optionally a draft trained here. Stages, because a call carries 64 MiB; see docs/serving.md.
#   serve_check.sh unpack      wheels, bundle (whatever of .whl, .carry/sglang is here)
#   serve_check.sh warm        compiles FlashInfer's kernels (in the background: `setsid ... warm &` while other parts travel)
#   serve_check.sh target      SmolLM2 from the two GGUF parts (.carry/a, .carry/b)
#   serve_check.sh draft       the public draft from .carry/draft, rewritten in the serving layout
#   serve_check.sh smoke       Engine with that draft, temperature 0 and 1; fills the kernel caches
#   serve_check.sh check NAME DRAFT LIMIT    offline evaluation, then serve-check; result in $OUT/NAME.json
#   serve_check.sh train       a draft of ours: 15,013 conversations, EPOCHS (9) times, BRIDGE (sglang), TRAIN_SECONDS (500) at most;
#                              its export is $W/run/export: then `check ours /tmp/serve/run/export 200`
#   serve_check.sh all         draft, smoke beside the offline evaluations, check of 64, then of 200 prompts
# Every step prints one JSON line {"step", "s", ...} as soon as it is done.
set -euo pipefail
cd "$(dirname "$0")/../.."
W=${WORK:-/tmp/serve}; B=/tmp/sglang_bundle; OUT=${OUT:-$W/out}
export DRAFT_JAX_CACHE=${DRAFT_JAX_CACHE:-/tmp/cache} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTHONPATH=/tmp/site:$PWD CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} FLASHINFER_CUDA_ARCH_LIST=9.0a
# FlashInfer's sampling kernels include curand.h, which pip's CUDA packages keep among Python's
if [ ! -e $CUDA_HOME/include/curand.h ]; then
  for h in $(python3 -c "import site; print(*site.getsitepackages())"); do
    for d in "$h"/nvidia/*/include; do [ ! -e "$d/curand.h" ] || export CPATH="$d${CPATH:+:$CPATH}"; done
  done
fi
TARGET=${TARGET:-$DRAFT_JAX_CACHE/SmolLM2-135M-Instruct}
# and what FlashInfer compiles is linked with -lcuda and -lcudart, which not every toolkit has under these names
mkdir -p $W/stubs; export LIBRARY_PATH=$W/stubs${LIBRARY_PATH:+:$LIBRARY_PATH}
for f in /usr/local/nvidia/lib64/libcuda.so.1 /usr/lib/x86_64-linux-gnu/libcuda.so.1 $CUDA_HOME/compat/libcuda.so.1; do
  [ ! -e $f ] || [ -e $W/stubs/libcuda.so ] || ln -s $f $W/stubs/libcuda.so
done
# flags for server and smoke: the bundle leaves FlashAttention-3 out, and 0.5.16's Triton backend is wrong for a draft
# (docs/serving.md): Triton for the target, FlashInfer for the draft; a third of the GPU
SERVER=(--server-pythonpath $B/transformers --server-pythonpath $B/rest --attention-backend triton --server-memory 0.3
        --draft-attention-backend "${DRAFT_BACKEND:-flashinfer}"
        --concurrency "${CONCURRENCY:-16}" --start-timeout 300 --request-timeout 300)
[ -n "${GRAPHS:-}" ] || SERVER+=(--server-arg disable_cuda_graph=true)
mkdir -p "$W/aot" "$OUT" /tmp/site
step() { printf '{"step": "%s", "s": %d%s}\n' "$1" "$SECONDS" "${2:+, $2}"; }

unpack() {
  if [ -d .whl ] && [ ! -e $W/wheels ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl; touch $W/wheels
  fi
  [ ! -d .carry/flashinfer_aot ] || cp -rn .carry/flashinfer_aot/. $W/aot/  # kernels compiled elsewhere (CUDA 13.0, sm_90a)
  if [ -d .carry/sglang ] && [ ! -e $B/done ]; then
    mkdir -p $B/transformers $B/rest
    for part in transformers sglang deps flashinfer; do
      into=$B/rest; [ $part = transformers ] && into=$B/transformers
      tar -xJf .carry/sglang/$part.tar.xz -C $into &
    done
    wait
    mkdir -p $B/rest/flashinfer/data/aot; cp -rn $W/aot/. $B/rest/flashinfer/data/aot/
    ls $B/rest/{sglang/version.py,flashinfer/__init__.py,msgspec/__init__.py} $B/transformers/transformers/__init__.py > /dev/null; touch $B/done
  fi
  step unpack "\"wheels\": $(ls /tmp/site | wc -l), \"bundle\": $([ -e $B/done ] && echo true || echo false)"
}
warm() { # in SGLang's own environment
  local path=$B/transformers:$B/rest:$PYTHONPATH
  PYTHONPATH=$path python3 tools/h200/warm_flashinfer.py > $W/warm.json 2> $W/warm.log || true
  if grep -q '"error"' $W/warm.json && ls $B/rest/flashinfer/data/aot/* > /dev/null 2>&1; then
    cat $W/warm.json; rm -rf $B/rest/flashinfer/data/aot  # what was compiled elsewhere does not load: compile here
    PYTHONPATH=$path python3 tools/h200/warm_flashinfer.py > $W/warm.json 2> $W/warm.log || true
  fi
  cat $W/warm.json; tail -2 $W/warm.log; touch $W/warmed
  step warm
}
warmed() { while [ ! -e $W/warmed ] && [ $SECONDS -lt 240 ]; do sleep 1; done; cat $W/warm.json; }
target() {
  for f in .carry/a/part_aa .carry/b/part_ab .carry/b/train.jsonl.gz /tmp/part_aa /tmp/part_ab /tmp/train.jsonl.gz; do
    if [ -f $f ] && [ ! -e $W/${f##*/} ]; then cp $f $W/; fi
  done
  [ ! -f $W/train.jsonl.gz ] || [ -e $W/data/held_out.jsonl ] || python3 tools/h200/held_out.py $W/train.jsonl.gz $W/data 200
  if [ -f $W/part_aa ] && [ -f $W/part_ab ] && [ ! -e "$TARGET/draft_jax_source.json" ]; then
    cat $W/part_aa $W/part_ab > /tmp/SmolLM2-135M-Instruct.Q4_1.gguf
    JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES= python3 - <<'P'
import hashlib, json
from pathlib import Path
from target_bridge import small_target as s
gguf, folder = Path("/tmp") / s.GGUF_FILE, s.default_folder()
assert hashlib.sha256(gguf.read_bytes()).hexdigest() == s.GGUF_SHA256, "the GGUF parts are not the file"
folder.parent.mkdir(parents=True, exist_ok=True)
s.convert_gguf(gguf, folder)
(folder / s.COMPLETE).write_text(json.dumps({"source": "carried"}))
P
  fi
  step target "\"complete\": $([ -e "$TARGET/draft_jax_source.json" ] && echo true || echo false)"
}
draft() {
  [ -e $W/deepspec/config.json ] || JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES= python3 -m train.cli export --draft .carry/draft \
    --target "$TARGET" --output $W/deepspec > $W/export.log
  step draft "\"checks\": $(grep -c '^ *ok' $W/export.log || echo 0)"
}
smoke() { python3 tools/h200/serve_smoke.py "$TARGET" $W/deepspec "${SERVER[@]}" --output $W/smoke 2> >(tee $W/smoke.log >&2) | tee "$OUT/smoke.json"; step smoke; }
offline() { # NAME DRAFT LIMIT TEMPERATURE
  python3 -m train.cli eval --draft "$2" --target "$TARGET" --prompts $W/data/held_out.jsonl --limit "$3" --no-plain \
    --dtype bfloat16 --temperature "$4" --memory-fraction 0.15 --output "$W/$1_t$4.json" ${EVAL_ARGS:-} > "$W/$1_t$4.log" 2>&1 || { tail -5 "$W/$1_t$4.log"; return 1; }
  step "offline_$1_t$4" "\"accept_length\": $(python3 -c "import json; print(json.load(open('$W/$1_t$4.json'))['accept_length'])")"
}
served() { # NAME DRAFT LIMIT
  local code=0
  python3 -m train.cli serve-check --draft "$2" --target "$TARGET" --prompts $W/data/held_out.jsonl --limit "$3" \
    --offline "$W/$1_t0.json" "$W/$1_t1.json" "${SERVER[@]}" --output "$W/$1" 2>&1 | tee "$OUT/$1.txt" || code=$?
  [ -f "$W/$1/result.json" ] && cp "$W/$1/result.json" "$OUT/$1.json" || true
  step "serve_check_$1" "\"exit_code\": $code"
}
check() { offline "$1" "$2" "$3" 0 & offline "$1" "$2" "$3" 1 & wait; served "$1" "$2" "$3"; }
train() {
  local engine=() code=0 path=$PYTHONPATH
  if [ "${BRIDGE:-sglang}" = sglang ]; then
    engine=(--target.sglang.attention_backend triton --target.sglang.mem_fraction_static 0.3); path=$B/transformers:$B/rest:$PYTHONPATH
  fi
  PYTHONPATH=$path SGLANG_ENABLE_JIT_DEEPGEMM=0 timeout -s TERM "${TRAIN_SECONDS:-500}" python3 -m train.cli train \
    --config configs/smollm2-135m.yaml --run_dir $W/run --target.path "$TARGET" --target.bridge "${BRIDGE:-sglang}" "${engine[@]}" \
    --data.path $W/data/train.jsonl --train.epochs "${EPOCHS:-9}" --checkpoint.every 0 ${TRAIN_ARGS:-} > $W/train.log 2>&1 || code=$?
  tail -3 $W/train.log; cp $W/run/metrics.jsonl "$OUT/train_metrics.jsonl" || true
  step train "\"exit_code\": $code"
  JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES= python3 -m train.cli export --run $W/run --target "$TARGET" --output $W/run/export --force > $W/export_run.log 2>&1 \
    || tail -5 $W/export_run.log
  step export
}
all() {
  draft
  [ -e $W/warmed ] || { [ -e $W/warm.log ] && warmed || warm; }
  smoke &
  offline ds64 $W/deepspec 64 0 & offline ds64 $W/deepspec 64 1 &
  wait
  served ds64 $W/deepspec 64
  check ds200 $W/deepspec 200
  step total
}
"$@"
