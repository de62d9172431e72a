#!/bin/bash
# Style: a recipe of Megatron-Bridge with overrides.
export CUDA_DEVICE_MAX_CONNECTIONS=1
NODES=4
torchrun --nproc-per-node=8 --nnodes=$NODES scripts/training/run_recipe.py \
    --recipe llama3_70b_pretrain_config \
    model.tensor_model_parallel_size=4 \
    model.pipeline_model_parallel_size=4 \
    model.virtual_pipeline_model_parallel_size=5 \
    model.context_parallel_size=2 \
    model.sequence_parallel=true \
    model.seq_length=8192 dataset.sequence_length=8192 \
    train.micro_batch_size=1 train.global_batch_size=128 train.train_iters=100 \
    ddp.use_distributed_optimizer=true ddp.overlap_grad_reduce=true ddp.overlap_param_gather=True \
    'model.recompute_modules=[mlp]' model.recompute_granularity=selective \
    optimizer.lr=0.0003 logger.wandb_project=x model.brand_new_key=3
