#!/usr/bin/env bash
# Pretrain with MTP heads on one node of 8 GPUs, or on several: start it on each of them with
# NNODES, and HEAD_NODE as host:port. Further flags are passed on and override those of flags.sh.
#
#   bash examples/pretrain/torchrun.sh
#   DATA=/data/corpus_text_document TOKENIZER=org/model bash examples/pretrain/torchrun.sh --lr 1e-4
#
# ENTRY=~/Megatron-LM/pretrain_gpt.py runs a patched checkout's own script instead of ours.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/flags.sh"

export CUDA_DEVICE_MAX_CONNECTIONS=1  # wanted by tensor and context parallelism
RENDEZVOUS=(--standalone)
if [[ "${NNODES:-1}" -gt 1 ]]; then
  RENDEZVOUS=(
    --nnodes "$NNODES" --rdzv-backend c10d --rdzv-id "${RUN_ID:-mtp}"
    --rdzv-endpoint "${HEAD_NODE:?host:port of the first node}"
  )
fi
exec torchrun "${RENDEZVOUS[@]}" --nproc-per-node "${GPUS_PER_NODE:-8}" \
  "${ENTRY:-$here/pretrain_gpt.py}" "${FLAGS[@]}" "$@"
