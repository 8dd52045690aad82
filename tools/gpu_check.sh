#!/usr/bin/env bash
# What to run on a machine with one GPU, within ten minutes: the unit suites on CUDA (cases of one rank
# on NCCL; cases of more ranks than GPUs fall back to CPU and gloo), imported heads of Transformer
# Engine's modules, context parallelism of two ranks that share the GPU over gloo, and the demo at its
# smallest.
# Transformer Engine is used where tests ask for it and it is installed.
#
#     bash tools/gpu_check.sh [--dry-run] [FOLDER FOR LOGS]
#
# --dry-run prints the steps and their time limits and runs none; it needs no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
dry_run=
case "${1:-}" in
    -h | --help) sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "tools/${0##*/}"; exit 0 ;;
    --dry-run) dry_run=1; shift ;;
esac
case "${1:-}" in
    -*) echo "error: no option ${1}; see --help" >&2; exit 2 ;;
esac
logs=${1:-build/gpu_check}

status=0
run() {  # NAME SECONDS COMMAND...
    local name=$1 seconds=$2
    shift 2
    if [ -n "$dry_run" ]; then
        echo "$name: at most $seconds s: $*"
        return
    fi
    echo "== $name"
    timeout "$seconds" "$@" > "$logs/$name.log" 2>&1 || status=1
    tail -n 3 "$logs/$name.log"
}

if [ -z "$dry_run" ]; then
    mkdir -p "$logs"
    make tree
    .venv/bin/python - <<'PY'
import torch
if not torch.cuda.is_available():
    raise SystemExit("error: no GPU is visible to torch; this check is for machines that have one.")
print("torch", torch.__version__, "on", torch.cuda.get_device_name(0))
PY
fi
unit=tests/unit_tests/transformer
run harness 80 make test TESTS="tests/support $unit/test_mtp_support.py"
run models 170 make test TESTS="$unit/test_mtp_return_logits.py $unit/test_mtp_hybrid.py \
$unit/test_mtp_isolation.py"
run objective 90 make test TESTS="$unit/test_mtp_shift.py $unit/test_mtp_targets.py \
$unit/test_mtp_normalization.py $unit/test_mtp_reference.py $unit/test_mtp_metrics.py \
$unit/test_mtp_chunk_logits.py $unit/test_mtp_chunked.py $unit/test_mtp_teacher_reference.py"
run heads 60 make test TESTS=tests/tools/mtp_checkpoint/test_native_transformer_engine.py
run two-ranks-one-gpu 100 make test-dist ARGS="-k one_gpu"
run demo 100 make demo ARGS="--size tiny"
exit $status
