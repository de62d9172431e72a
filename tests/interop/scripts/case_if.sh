#!/bin/bash
# Style: one script for several sizes; the first argument says which.
MODEL_SIZE=${1:-7b}
SEQ_LEN=${SEQ_LEN:-4096}
export CUDA_DEVICE_MAX_CONNECTIONS=1

case $MODEL_SIZE in
    7b|7B)
        LAYERS=32; HIDDEN=4096; FFN=11008; HEADS=32; TP=2; PP=1 ;;
    13b)
        LAYERS=40; HIDDEN=5120; FFN=13824; HEADS=40; TP=4; PP=1 ;;
    70b)
        LAYERS=80; HIDDEN=8192; FFN=28672; HEADS=64; TP=8; PP=4 ;;
    *)
        echo "unknown size $MODEL_SIZE"
        exit 1
        ;;
esac

if [ "$HIDDEN" -ge 8192 ]; then
    GQA="--group-query-attention --num-query-groups 8"
else
    GQA=""
fi
if [ $TP -gt 1 ]; then
    SP="--sequence-parallel"
fi
if [ -z "$NNODES" ]; then NNODES=1; fi
[[ $SEQ_LEN -gt 8192 ]] && CP=2 || CP=1

torchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py \
    --num-layers $LAYERS --hidden-size $HIDDEN --ffn-hidden-size $FFN --num-attention-heads $HEADS $GQA \
    --seq-length $SEQ_LEN --max-position-embeddings $SEQ_LEN --context-parallel-size $CP \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP $SP \
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear \
    --untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0.0 \
    --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 64 --bf16 \
    --tokenizer-type Llama2Tokenizer --train-iters 1000
