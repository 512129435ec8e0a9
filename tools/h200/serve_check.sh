#!/usr/bin/env bash
# serve-check on an H200 without network: stock SGLang 0.5.16 from tools/sglang_bundle, the public DeepSpec draft of
# SmolLM2, then optionally a draft trained here. Stages, because a call carries 64 MiB; see docs/serving.md.
#   serve_check.sh unpack      wheels, bundle (whatever of .whl, .carry/sglang is here)
#   serve_check.sh warm        compiles FlashInfer's kernels (in the background: `setsid ... warm &` while other parts travel)
#   serve_check.sh target      SmolLM2 from the two GGUF parts (.carry/a, .carry/b)
#   serve_check.sh draft       the public draft from .carry/draft, rewritten in the serving layout
#   serve_check.sh check NAME DRAFT LIMIT    offline evaluation, then serve-check; result in $OUT/NAME.json
#   serve_check.sh train       a draft of ours on 15,013 conversations, TRAIN_STEPS steps (default: what TRAIN_SECONDS hold at STEP_MS
#                              each behind 90 s of starting), BRIDGE (sglang), stopped and saved after TRAIN_SECONDS (500);
#                              its export is $W/run/export: then `check ours /tmp/serve/run/export 200`
# Every step prints one JSON line {"step", "s", ...} as soon as it is done. tools/h200/bridge.sh runs what it can side by side.
# A dry run on a CPU: DEVICE=cpu ATTENTION=torch_native BUNDLE=/nowhere EXTRA_PATH=tests/sglang/standin ... serve_check.sh train
set -euo pipefail
cd "$(dirname "$0")/../.."
W=${WORK:-/tmp/serve}; B=${BUNDLE:-/tmp/sglang_bundle}; OUT=${OUT:-$W/out}; CARRY=${CARRY:-.carry}; WHL=${WHL:-.whl}; SITE=${SITE:-/tmp/site}
DEVICE=${DEVICE:-cuda} ATTENTION=${ATTENTION:-triton}
export DRAFT_JAX_CACHE=${DRAFT_JAX_CACHE:-/tmp/cache} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTHONPATH=${EXTRA_PATH:+$EXTRA_PATH:}$SITE:$PWD CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} FLASHINFER_CUDA_ARCH_LIST=9.0a
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
# flags for the server: the bundle leaves FlashAttention-3 out, and 0.5.16's Triton backend is wrong for a draft
# (docs/serving.md): Triton for the target, FlashInfer for the draft; a third of the GPU
SERVER=(--server-pythonpath $B/transformers --server-pythonpath $B/rest --attention-backend triton --server-memory "${SERVER_MEMORY:-0.3}"
        --draft-attention-backend "${DRAFT_BACKEND:-flashinfer}"
        --concurrency "${CONCURRENCY:-16}" --start-timeout 300 --request-timeout 300)
[ -n "${GRAPHS:-}" ] || SERVER+=(--server-arg disable_cuda_graph=true)
mkdir -p "$W/aot" "$OUT" "$SITE"
step() { printf '{"step": "%s", "s": %d%s}\n' "$1" "$SECONDS" "${2:+, $2}"; }

unpack() {
  if [ -d "$WHL" ] && [ ! -e $W/wheels ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$WHL"/*.whl; touch $W/wheels
  fi
  [ ! -d $CARRY/flashinfer_aot ] || cp -rn $CARRY/flashinfer_aot/. $W/aot/  # kernels compiled elsewhere (CUDA 13.0, sm_90a)
  if [ -d $CARRY/sglang ] && [ ! -e $B/done ]; then
    mkdir -p $B/transformers $B/rest
    for part in transformers sglang deps flashinfer; do
      into=$B/rest; [ $part = transformers ] && into=$B/transformers
      tar -xJf $CARRY/sglang/$part.tar.xz -C $into &
    done
    wait
    ls $B/rest/{sglang/version.py,flashinfer/__init__.py,msgspec/__init__.py} $B/transformers/transformers/__init__.py > /dev/null; touch $B/done
  fi
  if [ -e $B/done ] && [ -n "$(ls -A $W/aot)" ]; then mkdir -p $B/rest/flashinfer/data/aot; cp -rn $W/aot/. $B/rest/flashinfer/data/aot/; fi
  step unpack "\"wheels\": $(ls "$SITE" | wc -l), \"bundle\": $([ -e $B/done ] && echo true || echo false)"
}
warm() { # in SGLang's own environment
  local path=$B/transformers:$B/rest:$PYTHONPATH
  PYTHONPATH=$path python3 tools/h200/warm_flashinfer.py > $W/warm.json 2> $W/warm.log || true
  if grep -q '"error"' $W/warm.json && ls $B/rest/flashinfer/data/aot/* > /dev/null 2>&1; then
    cat $W/warm.json; rm -rf $B/rest/flashinfer/data/aot  # what was compiled elsewhere does not load: compile here
    PYTHONPATH=$path python3 tools/h200/warm_flashinfer.py > $W/warm.json 2> $W/warm.log || true
  fi
  cat $W/warm.json; tail -2 $W/warm.log
  step warm
}
target() {
  for f in $CARRY/a/part_aa $CARRY/b/part_ab $CARRY/b/train.jsonl.gz /tmp/part_aa /tmp/part_ab /tmp/train.jsonl.gz; do
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
  [ -e $W/deepspec/config.json ] || JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES= python3 -m train.cli export --draft $CARRY/draft \
    --target "$TARGET" --output $W/deepspec > $W/export.log
  step draft "\"checks\": $(grep -c '^ *ok' $W/export.log || echo 0)"
}
offline() { # NAME DRAFT LIMIT TEMPERATURE
  python3 -m train.cli eval --draft "$2" --target "$TARGET" --prompts $W/data/held_out.jsonl --limit "$3" --no-plain \
    --dtype bfloat16 --temperature "$4" --device "$DEVICE" --memory-fraction 0.05 --output "$W/$1_t$4.json" ${EVAL_ARGS:-} > "$W/$1_t$4.log" 2>&1 || { tail -5 "$W/$1_t$4.log"; return 1; }
  step "offline_$1_t$4" "\"accept_length\": $(python3 -c "import json; print(json.load(open('$W/$1_t$4.json'))['accept_length'])")"
}
served() { # NAME DRAFT LIMIT
  local code=0
  python3 -m train.cli serve-check --draft "$2" --target "$TARGET" --prompts $W/data/held_out.jsonl --limit "$3" \
    --offline "$W/$1_t0.json" "$W/$1_t1.json" "${SERVER[@]}" ${SERVE_ARGS:-} --output "$W/$1" 2>&1 | tee "$OUT/$1.txt" || code=$?
  [ -f "$W/$1/result.json" ] && cp "$W/$1/result.json" "$OUT/$1.json" || true
  cp $W/$1/*.log "$OUT/" 2> /dev/null || true
  step "serve_check_$1" "\"exit_code\": $code"
  return $code
}
both() { offline "$1" "$2" "$3" 0 & local first=$!; offline "$1" "$2" "$3" 1; wait $first; }  # the two temperatures side by side
check() { both "$1" "$2" "$3"; served "$1" "$2" "$3"; }
train() {
  local engine=() code=0 path=$PYTHONPATH seconds=${TRAIN_SECONDS:-500} steps
  steps=${TRAIN_STEPS:-$(((seconds - 90) * 1000 / ${STEP_MS:-80}))}
  if [ "${BRIDGE:-sglang}" = sglang ]; then
    # 0.6: weights and KV pool are small, and other processes may be taking memory meanwhile
    engine=(--target.sglang.attention_backend="$ATTENTION" --target.sglang.mem_fraction_static=0.6); path=$B/transformers:$B/rest:$PYTHONPATH
  fi
  (while sleep 10; do cp "$W/run/metrics.jsonl" "$OUT/train_metrics.jsonl" || true; done 2> /dev/null) & local copying=$!
  PYTHONPATH=$path SGLANG_ENABLE_JIT_DEEPGEMM=0 timeout -s TERM -k 60 "$seconds" python3 -m train.cli train \
    --config configs/smollm2-135m.yaml --run_dir=$W/run --target.path="$TARGET" --target.bridge="${BRIDGE:-sglang}" --target.device="$DEVICE" \
    "${engine[@]}" --data.path=$W/data/train.jsonl --train.epochs=null --train.steps="$steps" --train.memory_fraction=0.15 \
    --checkpoint.every=0 --logging.progress=false ${TRAIN_ARGS:-} > $W/train.log 2>&1 || code=$?
  kill $copying || true; cp $W/train.log "$OUT/train.log"; cp $W/run/metrics.jsonl "$OUT/train_metrics.jsonl" || true
  grep -E '^(PASS|FAIL|PROBE|layer|final|kept)' $W/train.log || true; tail -3 $W/train.log
  step train "\"exit_code\": $code, \"steps_asked\": $steps, $(python3 - "$W/run/metrics.jsonl" <<'P' || echo '"metrics": null'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
late = lines[len(lines) // 2 :]
mean = lambda name: sum(line[name] for line in late) / len(late)
print(f'"steps": {lines[-1]["step"]}, "training_s": {sum(line["seconds_per_step"] for line in lines):.1f}, '
      f'"second_half": {{"ms_per_step": {1e3 * mean("seconds_per_step"):.1f}, "tokens_per_s": {mean("tokens_per_second"):.0f}, '
      f'"target_share": {mean("capture_share"):.3f}, "draft_share": {mean("draft_share"):.3f}, "tau_probabilistic": '
      f'{sum(line["tau_probabilistic"] for line in lines[-50:]) / len(lines[-50:]):.3f}}}')
P
)"
  JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES= python3 -m train.cli export --run $W/run --target "$TARGET" --output $W/run/export --force > $W/export_run.log 2>&1 \
    || tail -5 $W/export_run.log
  step export "\"complete\": $([ -s $W/run/export/model.safetensors ] && echo true || echo false)"
  [ -s $W/run/export/model.safetensors ]
}
"$@"
