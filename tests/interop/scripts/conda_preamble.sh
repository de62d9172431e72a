#!/bin/bash -l
# Style: modules, conda and network settings first, python -m torch.distributed.launch.
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
module purge
module load cuda/12.4 nccl || true
source ~/miniconda3/etc/profile.d/conda.sh
conda activate megatron
ulimit -l unlimited
cd "$WORK/Megatron-LM" || exit 1
export NCCL_IB_HCA=mlx5 OMP_NUM_THREADS=8
export CUDA_DEVICE_MAX_CONNECTIONS=1
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PYTHONPATH=$PWD:$PYTHONPATH

if ! command -v nvidia-smi > /dev/null; then
  echo "no GPU" >&2; exit 2
fi
[[ -d $CKPT ]] || mkdir -p "$CKPT"

python -m torch.distributed.launch \
    --nproc_per_node 4 --nnodes $SLURM_NNODES --node_rank $SLURM_NODEID --master_addr $MASTER_ADDR \
    pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 128 \
    --tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt \
    --fp16 --lr 0.00015 --train-iters 320000 --tensorboard-dir "$CKPT/tb" > "log_$(hostname).txt" 2>&1
