#!/usr/bin/env bash
# What to run on a machine with one GPU, within ten minutes: the unit suites on CUDA (cases of one rank
# on NCCL; cases of more ranks than GPUs fall back to CPU and gloo), and the demo at its smallest.
# Transformer Engine is used where tests ask for it and it is installed.
#
#     bash tools/gpu_check.sh [FOLDER FOR LOGS]
set -euo pipefail
cd "$(dirname "$0")/.."
logs=${1:-build/gpu_check}
mkdir -p "$logs"

make tree
.venv/bin/python - <<'PY'
import torch
if not torch.cuda.is_available():
    raise SystemExit("error: no GPU is visible to torch; this check is for machines that have one.")
print("torch", torch.__version__, "on", torch.cuda.get_device_name(0))
PY

status=0
run() {  # NAME SECONDS COMMAND...
    local name=$1 seconds=$2
    shift 2
    echo "== $name"
    timeout "$seconds" "$@" > "$logs/$name.log" 2>&1 || status=1
    tail -n 3 "$logs/$name.log"
}
run harness 120 make test TESTS="tests/support tests/unit_tests/transformer/test_mtp_support.py"
run models 200 make test TESTS="tests/unit_tests/transformer/test_mtp_return_logits.py \
    tests/unit_tests/transformer/test_mtp_hybrid.py tests/unit_tests/transformer/test_mtp_isolation.py"
run objective 120 make test TESTS="tests/unit_tests/transformer/test_mtp_shift.py \
    tests/unit_tests/transformer/test_mtp_targets.py \
    tests/unit_tests/transformer/test_mtp_normalization.py \
    tests/unit_tests/transformer/test_mtp_reference.py \
    tests/unit_tests/transformer/test_mtp_metrics.py"
run demo 100 make demo ARGS="--size tiny"
exit $status
