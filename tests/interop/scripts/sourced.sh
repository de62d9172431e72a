#!/bin/bash
# Style: the cluster and the model live in files of their own.
SCRIPT_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$SCRIPT_DIR/sourced_cluster.env"
. "${SCRIPT_DIR}/sourced_model.inc"
source /opt/site/secrets.sh

torchrun --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" --micro-batch-size 1 --global-batch-size 256 --bf16 \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --sequence-parallel \
    --use-distributed-optimizer --train-iters 10 --vocab-size 128256
