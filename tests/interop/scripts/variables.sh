#!/usr/bin/env bash
# Style: plain variables, one long command with line continuations.
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1

NODES=${NODES:-2}
GPUS=8
TP=2; PP=2
MBS=1
SEQ=4096
GBS=$((NODES * GPUS * 4))   # 64

torchrun --nproc_per_node=$GPUS --nnodes=$NODES --node_rank ${RANK:-0} --master_addr ${MASTER:-localhost} \
  pretrain_gpt.py \
  --tensor-model-parallel-size ${TP} \
  --pipeline-model-parallel-size ${PP} \
  --sequence-parallel \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size=11008 --num-attention-heads 32 \
  --seq-length $SEQ --max-position-embeddings $SEQ \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 \
  --tokenizer-type Llama2Tokenizer --tokenizer-model /data/tokenizer.model \
  --micro-batch-size "$MBS" --global-batch-size "$GBS" \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --bf16 --lr 3.0e-4 --min-lr 3e-5 --train-iters 1000 --save /ckpt --save-interval 500 \
  --data-path "$DATA" --split 99,1,0
