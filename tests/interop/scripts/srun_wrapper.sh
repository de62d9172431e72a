#!/bin/bash
# Style: options collected in one text, run by srun inside a container through sh -c.
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=8
#SBATCH --partition=batch

DIR=`pwd`
DATETIME=`date +'date_%y-%m-%d_time_%H-%M-%S'`
mkdir -p $DIR/logs

options=" \
    --distributed-timeout-minutes 60 \
    --use-distributed-optimizer \
    --tensor-model-parallel-size 8 \
    --pipeline-model-parallel-size 8 \
    --num-layers-per-virtual-pipeline-stage 5 \
    --recompute-activations \
    --sequence-parallel \
    --num-layers 80 \
    --hidden-size 8192 \
    --num-attention-heads 64 \
    --group-query-attention \
    --num-query-groups 8 \
    --ffn-hidden-size 28672 \
    --seq-length 4096 \
    --max-position-embeddings 4096 \
    --use-rotary-position-embeddings \
    --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \
    --micro-batch-size 1 \
    --global-batch-size 512 \
    --train-samples 500000000 \
    --lr 1.5e-4 --min-lr 1e-5 \
    --bf16 \
    --vocab-size 32000 --tokenizer-type Llama2Tokenizer --tokenizer-model ${DIR}/tokenizer.model \
    --hidden-dropout 0.0 --attention-dropout 0.0 \
    --data-path ${DATA_BLEND}"

run_cmd="cd $DIR && CUDA_DEVICE_MAX_CONNECTIONS=1 python -u ${DIR}/pretrain_gpt.py ${options}"

srun -l \
     --container-image "nvcr.io/nvidia/pytorch:24.10-py3" \
     --container-mounts "/data:/data" \
     --output=$DIR/logs/%x_%j_$DATETIME.log sh -c "${run_cmd}"
