#!/usr/bin/env bash
# Everything about the SGLang bridge on one H200 without network, in one lease: each job starts as soon as what it needs
# has travelled, on whatever the others leave free, and goes on between the calls. Nothing is lost when the time is up.
#   bridge.sh land            after a call's parts came: unpacks them; the first time it starts the jobs
#   bridge.sh wait SECONDS    until all jobs are done, or so long; results into $OUT as they come, a line per job
# Jobs: loop_8b first, alone on the GPU while the small target travels and is converted (LOOP_LAST=1: at the end); then
# train, evaluation and serve-check of our draft; beside them smoke (sglang_smoke.py), evaluation and serve-check of the
# public draft. TRAIN_SECONDS (200), PROMPTS (200), JOBS="loop_8b smoke train ours ds" (which of them); docs/serving.md.
set -uo pipefail
cd "$(dirname "$0")/../.."
export WORK=${WORK:-/tmp/serve} BUNDLE=${BUNDLE:-/tmp/sglang_bundle} CARRY=${CARRY:-.carry} SITE=${SITE:-/tmp/site}
W=$WORK; STATE=$W/state; HERE=$PWD/tools/h200; RESULTS=$W/out
mkdir -p "$STATE" "$RESULTS" "$W/log"
export TRAIN_SECONDS=${TRAIN_SECONDS:-200} LOOP_SECONDS=${LOOP_SECONDS:-170}
PROMPTS=${PROMPTS:-200} JOBS=${JOBS:-loop_8b smoke train ours ds}
export EVAL_ARGS=${EVAL_ARGS:---batch-size 100} CONCURRENCY=${CONCURRENCY:-64} SERVER_MEMORY=${SERVER_MEMORY:-0.15}
now() { date +%s; }
stage() { OUT=$RESULTS bash "$HERE/serve_check.sh" "$@"; }
job() { # NAME COMMAND...: runs it, notes how it ended
  local name=$1 begin code=0; shift; begin=$(now)
  printf '{"job": "%s", "at": %d, "state": "starts"}\n' "$name" $((begin - $(cat "$STATE/begin"))) >> "$STATE/jobs.jsonl"
  "$@" > "$W/log/$name.log" 2>&1 || code=$?
  { printf '{"job": "%s", "at": %d, "s": %d, "exit_code": %d}\n' "$name" $(($(now) - $(cat "$STATE/begin"))) $(($(now) - begin)) "$code"
    case $name in *_served) tail -80 "$W/log/$name.log" ;; *) grep '^{' "$W/log/$name.log" | tail -14 ;; esac
    [ $code -eq 0 ] || { echo "--- $name failed; its log ends:"; tail -8 "$W/log/$name.log" | cut -c1-500; }; } >> "$STATE/jobs.jsonl"
  echo $code > "$STATE/$name.done"; return $code
}
after() { for name; do until [ -e "$STATE/$name.done" ]; do sleep 0.5; done; done; }              # whatever came of it
need() { after "$@"; for name; do [ "$(cat "$STATE/$name.done")" = 0 ] || return 1; done; }        # and it went well
skip() { for name; do echo 99 > "$STATE/$name.done"; echo "{\"job\": \"$name\", \"state\": \"left out\"}" >> "$STATE/jobs.jsonl"; done; }
wanted() { [[ " $JOBS " == *" $1 "* ]]; }
compile() { python3 -m compileall -q -j 0 "$BUNDLE" "$SITE" > /dev/null; true; } # SGLang's import compiles thousands of files one by one otherwise
smoke() {
  local python=(env PYTHONPATH="$BUNDLE/transformers:$BUNDLE/rest:${EXTRA_PATH:+$EXTRA_PATH:}$SITE:$PWD" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1)
  "${python[@]}" timeout "${SMOKE_SECONDS:-300}" python3 tools/h200/sglang_smoke.py random ${SMOKE_ARGS:-}
}
jobs_of_this_lease() {
  ( need bundle wheels; job compiled compile ) &
  turn() { if [ "${LOOP_LAST:-0}" = 1 ]; then after compiled; else after compiled loop_8b; fi; }
  ( if wanted loop_8b && need bundle wheels; then
      after compiled; [ "${LOOP_LAST:-0}" != 1 ] || after ours_served ds_served smoke
      OUT=$RESULTS job loop_8b bash "$HERE/loop_8b.sh"
    else skip loop_8b; fi ) &
  ( if wanted smoke && need bundle wheels && turn; then job smoke smoke; else skip smoke; fi ) &
  ( need bundle parts; after compiled; job warm stage warm ) & # kernels compiled elsewhere travel with the parts, or not at all
  ( need parts wheels; job target stage target ) &
  ( if wanted train && need target && turn; then job train stage train; else skip train; fi
    if wanted ours && need train && job ours_offline stage both ours "$W/run/export" "$PROMPTS"; then
      after warm; job ours_served stage served ours "$W/run/export" "$PROMPTS"
    else skip ours_served; fi ) &
  ( export CARRY=$W/carried
    if wanted ds && need public_draft target && job public_converted stage draft && turn && after smoke \
      && job ds_offline stage both ds "$W/deepspec" "$PROMPTS"; then
      after warm; SERVE_ARGS=${DS_SERVE_ARGS---no-plain} job ds_served stage served ds "$W/deepspec" "$PROMPTS"
    else skip ds_served; fi ) &
  wait; echo 0 > "$STATE/all.done"
}
land() {
  [ -e "$STATE/begin" ] || now > "$STATE/begin"
  touch "$STATE/jobs.jsonl"
  if [ ! -e "$STATE/started" ]; then
    touch "$STATE/started"; setsid bash "$HERE/bridge.sh" jobs_of_this_lease > "$W/log/jobs.log" 2>&1 < /dev/null &
  fi
  stage unpack || echo "unpack failed"
  for f in "$CARRY"/a/part_aa "$CARRY"/b/part_ab "$CARRY"/b/train.jsonl.gz; do [ ! -f "$f" ] || cp -n "$f" "$W/"; done
  if [ -s "$CARRY/draft/model.safetensors" ] && [ ! -e "$STATE/public_draft.done" ]; then
    mkdir -p "$W/carried/draft"; cp "$CARRY"/draft/* "$W/carried/draft/"; echo 0 > "$STATE/public_draft.done"
  fi
  [ ! -e "$BUNDLE/done" ] || echo 0 > "$STATE/bundle.done"
  [ ! -e "$W/wheels" ] || echo 0 > "$STATE/wheels.done"
  if [ -s "$W/part_aa" ] && [ -s "$W/part_ab" ] && [ -s "$W/train.jsonl.gz" ]; then echo 0 > "$STATE/parts.done"; fi
  echo "{\"landed\": \"$(cd "$STATE" && echo *.done)\", \"at\": $(($(now) - $(cat "$STATE/begin")))}"
}
pack() { # at most 8 files come back: one archive, replaced whole
  cp "$STATE/jobs.jsonl" "$W"/log/*.log "$RESULTS/" 2> /dev/null
  tar czf "$W/results.tmp" -C "$RESULTS" . 2> /dev/null; mv "$W/results.tmp" "$OUT/results.tgz"
}
wait_for() {
  local until=$(($(now) + $1)) seen=${SEEN:-0} lines
  while [ "$(now)" -lt "$until" ] && [ ! -e "$STATE/all.done" ]; do
    lines=$(wc -l < "$STATE/jobs.jsonl" 2> /dev/null || echo 0)
    if [ "$lines" -gt "$seen" ]; then sed -n "$((seen + 1)),${lines}p" "$STATE/jobs.jsonl" | cut -c1-1500; seen=$lines; pack; fi
    sleep 2
  done
  sed -n "$((seen + 1)),\$p" "$STATE/jobs.jsonl" | cut -c1-1500; pack
  [ -e "$STATE/all.done" ] && echo "all jobs are done" || { echo "still at work:"; tail -n 2 "$W"/log/*.log | cut -c1-300; }
}
case "$1" in
  wait) wait_for "$2" ;;
  land | jobs_of_this_lease) "$1" ;;
  *) sed -n 2,10p "$0"; exit 2 ;;
esac
