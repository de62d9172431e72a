#!/bin/bash
# Style: functions that build the arguments and start the job.
set -e

log() { echo "[$(date)] $*"; }

model_args() {
    local layers=$1 hidden=$2 heads=$3
    ARGS+=(--num-layers "$layers" --hidden-size "$hidden" --num-attention-heads "$heads")
    ARGS+=(--seq-length 2048 --max-position-embeddings 2048)
    return 0
}

function parallel_args {
    ARGS+=(--tensor-model-parallel-size ${1:-1} --pipeline-model-parallel-size ${2:-1})
}

run() {
    log "starting $1"
    torchrun --nproc-per-node ${GPUS:-8} "$@"
}

main() {
    declare -a ARGS=()
    model_args 36 2560 20
    parallel_args 2
    export CUDA_DEVICE_MAX_CONNECTIONS=1
    for extra in --bf16 --use-distributed-optimizer; do
        ARGS+=("$extra")
    done
    run pretrain_gpt.py "${ARGS[@]}" --micro-batch-size 4 --global-batch-size 64 \
        --train-iters 100 --tokenizer-type GPT2BPETokenizer --sequence-parallel
}

main "$@"
