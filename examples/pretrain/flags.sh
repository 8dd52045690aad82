# Flags of the run, for torchrun.sh and slurm.sbatch alike. Source this file; it sets FLAGS.
# OUTPUT is where checkpoints and logs go. DATA names a corpus prefix; without it data is made up.

MODEL=(
  --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5632
  --num-attention-heads 16 --group-query-attention --num-query-groups 4
  --swiglu --normalization RMSNorm --disable-bias-linear
  --position-embedding-type rope --untie-embeddings-and-output-weights
  --attention-dropout 0 --hidden-dropout 0
  --seq-length 4096 --max-position-embeddings 4096
)
# Two heads that train beside the policy and never touch it; every target weighs the same.
MTP=(
  --mtp-num-layers 2 --mtp-isolated-loss --mtp-loss-scaling-factor 0.1
  --calculate-per-token-loss --mtp-loss-normalization global
)
PARALLEL=(
  --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
TRAIN=(
  --bf16 --micro-batch-size 1 --global-batch-size 64 --train-iters "${TRAIN_ITERS:-1000}"
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 20
  --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
)
if [[ -n "${DATA:-}" ]]; then
  CORPUS=(
    --data-path "$DATA" --split 99,1,0
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:?name one with DATA}"
  )
else
  CORPUS=(--mock-data --split 99,1,0 --tokenizer-type NullTokenizer --vocab-size 32000)
fi
OUTPUT="${OUTPUT:-$PWD/mtp-pretrain}"
LOG=(
  --log-interval 10 --eval-interval 500 --eval-iters 5
  --tensorboard-dir "$OUTPUT/tensorboard"
  --save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints" --save-interval 500
  --ckpt-format torch_dist
)
if [[ -n "${WANDB_PROJECT:-}" ]]; then
  LOG+=(--wandb-project "$WANDB_PROJECT" --wandb-exp-name "${WANDB_NAME:-mtp}")
fi
FLAGS=("${MODEL[@]}" "${MTP[@]}" "${PARALLEL[@]}" "${TRAIN[@]}" "${CORPUS[@]}" "${LOG[@]}")
