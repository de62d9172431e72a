#!/bin/bash
# Style: arrays, comments between their items, += under a condition that the text decides.
export CUDA_DEVICE_MAX_CONNECTIONS=1
DTYPE="fp8"
CHECKPOINT=${1:-"runs/llama3_8b"}

LAUNCH=(--nproc_per_node 8 --nnodes 1)
MODEL=(
    --num-layers 32
    --hidden-size 4096        # of Llama 3 8B
    --ffn-hidden-size 14336
    --num-attention-heads 32
    # grouped queries
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
)
PRECISION=(--bf16)
if [[ "$DTYPE" == "fp8" ]]; then
    PRECISION+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
    )
elif [[ "$DTYPE" == "fp16" ]]; then
    PRECISION=(--fp16)
fi
TRAIN=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-samples 100000
    --lr 1e-4
)
TRAIN+=("${PRECISION[@]}")
PARALLEL=(--tensor-model-parallel-size 2 --context-parallel-size 1 --sequence-parallel --use-distributed-optimizer)

if [ ! -f pretrain_gpt.py ]; then
    echo "run this in Megatron-LM's folder"
    exit 1
fi

torchrun ${LAUNCH[@]} pretrain_gpt.py \
    "${MODEL[@]}" \
    ${TRAIN[@]} \
    "${PARALLEL[@]}" \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 \
    --save "$CHECKPOINT" --save-interval 1000
