#!/bin/bash
# Style: the job is written into a here-document and handed to a shell on every node.
#SBATCH --job-name=gpt
#SBATCH -N 4
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:a100:8
LAYERS=24

read -r -d '' OPTIONS <<'OPTS'
  --num-attention-heads 32 --seq-length 2048 \
  --max-position-embeddings 2048 \
  --micro-batch-size 2 --global-batch-size 256
OPTS

srun --label bash <<EOF
cd /workspace/megatron
export CUDA_DEVICE_MAX_CONNECTIONS=1
python pretrain_gpt.py --num-layers $LAYERS --hidden-size 4096 $OPTIONS \
   --tensor-model-parallel-size 4 --bf16 \
   --tokenizer-type GPT2BPETokenizer --vocab-file \$VOCAB --merge-file \$MERGES \
   --train-iters 500000 --lr 1e-4
EOF
