#!/bin/bash
# Style: launcher and command in two texts, joined by bash -c or eval.
GPUS_PER_NODE=8
NNODES=8

export LAUNCHER="python -u -m torch.distributed.run \
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes $NNODES \
    --rdzv_endpoint $MASTER_ADDR:6000 \
    --rdzv_backend c10d \
    --max_restarts 0 \
    "
GPT_ARGS=" \
    --num-layers 48 \
    --hidden-size 6144 \
    --num-attention-heads 48 \
    --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size 2 --global-batch-size 1024 \
    --bf16 --lr 1e-4 --train-samples 1000000 \
    "
PARALLEL_ARGS="--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4"
export CMD=" \
    pretrain_gpt.py \
    $PARALLEL_ARGS \
    $GPT_ARGS \
    --vocab-size 50304 --tokenizer-type NullTokenizer \
    --data-path $DATA_PATH \
    "
echo $CMD
eval "export CUDA_DEVICE_MAX_CONNECTIONS=1"
bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD' 2>&1 | tee -a main_log.txt
