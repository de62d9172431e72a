"""Megatron-LM's other options, by what they do to a prediction. Names and kinds as in options.py; names from other
releases than the one read there are from memory, and say so."""

from __future__ import annotations

# They change neither memory nor time by more than the interval, nor whether a run starts. By kind.
NEUTRAL: dict[str, str] = {
    "flag": """
    --apply-layernorm-1p --apply-residual-connection-post-layernorm --openai-gelu --rotary-interleaved
    --use-rope-scaling --log-straggler --disable-straggler-on-startup --run-workload-inspector-server
    --inprocess-restart --inprocess-empty-cuda-cache --one-logger-async --enable-ft-package --calc-ft-timeouts
    --log-params-norm --log-num-zeros-in-grad --log-throughput --log-progress --log-energy
    --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard
    --log-world-size-to-tensorboard --check-for-spiky-loss --check-for-large-grads --profile
    --use-pytorch-profiler --record-memory-history --use-cpu-initialization --calculate-per-token-loss
    --exit-signal-handler --use-flash-attn --no-persist-layer-norm --use-mcore-models --manual-gc
    --use-te-activation-func --data-parallel-random-init --init-method-xavier-uniform
    --override-opt_param-scheduler --override-opt-param-scheduler --use-checkpoint-opt_param-scheduler
    --use-checkpoint-opt-param-scheduler --no-save-optim --no-save-rng --no-load-optim
    --load-main-params-from-ckpt --no-load-rng --finetune --exit-on-missing-checkpoint --use-dist-ckpt
    --use-persistent-ckpt-worker --auto-detect-ckpt-format --ckpt-convert-update-legacy-dist-opt-format
    --ckpt-fully-parallel-save --async-save --ckpt-fully-parallel-load --ckpt-assume-constant-structure
    --dist-ckpt-save-pre-mcore-014 --dist-ckpt-optim-fully-reshardable
    --distrib-optim-fully-reshardable-mem-efficient --apply-query-key-layer-scaling --attention-softmax-in-fp32
    --disable-bf16-reduced-precision-matmul --init-model-with-meta-device --replication --full-validation
    --multiple-validation-sets --test-mode --legacy-tokenizer --trust-remote-code --mock-data
    --reset-position-ids --reset-attention-mask --eod-mask-loss --allow-ambiguous-pad-tokens --adlr-autoresume
    --qk-l2-norm --moe-grouped-gemm --moe-use-upcycling --moe-router-fusion --moe-router-pre-softmax
    --moe-router-enable-expert-bias --moe-router-force-load-balancing --moe-per-layer-logging
    --moe-apply-probs-on-input --cache-mla-latents --enable-experimental --te-rng-tracker
    --inference-rng-tracker --flash-decode --muon-use-nesterov --decrease-batch-size-if-needed
    --use-checkpoint-args --use-mp-args-from-checkpoint-args --deterministic-mode --cross-entropy-loss-fusion
    --overlap-p2p-communication-warmup-flush --moe-extended-tp
    --no-query-key-layer-scaling --delay-grad-reduce --delay-param-gather --overlap-p2p-communication
    --standalone-embedding-stage --use-legacy-static-engine --fused-residual-rmsnorm
    --log-max-attention-logit --high-precision-init-val
    """,
    "off": """
    --bert-no-binary-head --no-one-logger --no-barrier-with-level-1-timing --no-log-loss-scale-to-tensorboard
    --muon-no-split-qkv --no-check-for-nan-in-loss-and-grad --no-clone-scatter-output-in-embedding
    --disable-gloo-process-groups --no-async-tensor-model-parallel-allreduce --no-manual-gc-eval
    --no-initialization --no-use-tokenizer-model-from-checkpoint-args --no-strict-fsdp-dtensor-load
    --no-ckpt-fully-parallel-save --no-mmap-bin-files --no-create-attention-mask-in-dataloader
    --no-data-sharding --no-fp8-wgrad --no-pin-cpu-grads --no-pin-cpu-params --disable-msc
    --no-gradient-reduce-div-fusion --retro-no-verify-neighbor-count --use-gloo-process-groups
    --no-scatter-gather-tensors-in-pipeline --no-align-grad-reduce --no-align-param-gather
    --no-contiguous-buffers-in-local-ddp
    """,
    "int": """
    --rotary-base --rotary-seq-len-interpolation-factor --straggler-ctrlr-port --straggler-minmax-count
    --inprocess-max-iterations --inprocess-active-world-size --timing-log-level --tensorboard-log-interval
    --tensorboard-queue-size --logging-level --muon-num-ns-steps --profile-step-start --profile-step-end
    --check-weight-hash-across-dp-replicas-interval --train-sync-interval --log-interval --exit-interval
    --exit-duration-in-mins --manual-gc-interval --error-injection-rate --seed --lr-decay-iters
    --lr-decay-samples --lr-wsd-decay-samples --lr-wsd-decay-iters --lr-warmup-iters --lr-warmup-samples
    --save-interval --persistent-save-interval --save-retain-interval --non-persistent-save-interval --ckpt-step
    --hysteresis --distributed-timeout-minutes --distributed-timeout-seconds-after-init --replication-jump
    --replication-factor --local-rank --eval-iters --eval-interval --tiktoken-num-special-tokens --num-workers
    --num-dataset-builder-threads --adlr-autoresume-interval --moe-router-num-groups --moe-router-group-topk
    --moe-deepep-num-sms --moe-upcycling-granularity --wgrad-deferral-limit --fp8-margin --fp8-interval
    --fp8-amax-history-len --retriever-seq-length --relative-attention-num-buckets
    --relative-attention-max-distance --cuda-graph-warmup-steps --max-tokens-to-oom
    --inference-batch-times-seqlen-threshold --inference-max-requests --inference-max-seq-length
    --inference-max-batch-size --eval-global-batch-size --eval-micro-batch-size --original-max-position-embeddings
    --ddp-num-buckets
    """,
    "float": """
    --rotary-percent --rope-scaling-factor --norm-epsilon --layernorm-epsilon --activation-func-clamp-value
    --glu-linear-offset
    --mtp-loss-scaling-factor --weight-decay --start-weight-decay --end-weight-decay --clip-grad --adam-beta1
    --adam-beta2 --adam-eps --sgd-momentum --muon-momentum --muon-extra-scale-factor --init-method-std
    --embedding-init-method-std --lr --lr-warmup-fraction --lr-warmup-init --min-lr --decoupled-lr
    --decoupled-min-lr --loss-scale --initial-loss-scale --min-loss-scale --loss-scale-window --sample-rate
    --mask-prob --short-seq-prob --mid-level-dataset-surplus --moe-router-topk-scaling-factor
    --moe-router-bias-update-rate --moe-z-loss-coeff --moe-input-jitter-eps --rotary-scaling-factor --mscale
    --mscale-all-dim --inprocess-monitor-thread-interval --inprocess-monitor-process-interval
    --inprocess-progress-watchdog-interval --inprocess-heartbeat-interval --inprocess-soft-timeout
    --inprocess-hard-timeout --inprocess-heartbeat-timeout --inprocess-barrier-timeout
    --inprocess-completion-timeout --inprocess-last-call-wait --inprocess-termination-grace-time
    --attention-dropout
    """,
    "text": """
    --no-rope-freq --softmax-type --inprocess-granularity --one-logger-project --one-logger-run-name
    --app-tag-run-name --app-tag-run-version --config-logger-dir --timing-log-option --wandb-project
    --wandb-entity --wandb-exp-name --wandb-save-dir --weight-decay-incr-style --muon-scale-mode
    --muon-fp32-matmul-prec --muon-tp-mode --result-rejected-tracker-filename --memory-snapshot-path
    --tp-comm-overlap-cfg --tp-comm-bootstrap-backend --tensorboard-dir --rope-type --cross-entropy-fusion-impl
    --dump-param-to-param-group-map --dataloader-type --pipeline-model-parallel-comm-backend
    --error-injection-type --rerun-mode --lr-decay-style --lr-wsd-decay-style --save --load
    --non-persistent-ckpt-type --non-persistent-global-ckpt-dir --non-persistent-local-ckpt-dir
    --non-persistent-local-ckpt-algo --pretrained-checkpoint --dist-ckpt-format --ckpt-format
    --ckpt-convert-format --ckpt-convert-save --dist-ckpt-strictness --distributed-backend --lazy-mpu-init
    --sharp-enabled-group --nccl-communicator-config-path --vocab-file --merge-file --tokenizer-metadata
    --tiktoken-pattern --split --data-args-path --per-split-data-args-path --data-cache-path
    --object-storage-cache-path --moe-router-dtype --moe-router-score-function --moe-token-drop-policy
    --fp8-amax-compute-algo --fp8-quantizer-factory --onnx-safe --yaml-cfg --sft-tokenizer-prompt-format
    --kitchen-config-file --DDP-impl --symmetric-ar-type --bert-embedder-type --attention-backend
    --transformer-impl --moe-token-dispatcher-type --cuda-graph-impl --cuda-graph-scope --main-grads-dtype
    --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype
    """,
    "ints": """
    --iterations-to-skip --profile-ranks --mrope-section --hierarchical-context-parallel-sizes
    """,
    "texts": """
    --tiktoken-special-tokens --data-path --train-data-path --valid-data-path --test-data-path
    --moe-router-load-balancing-type --moe-aux-loss-coeff --high-priority-stream-groups
    """,
}

# Of the next table, the options with which a launch needs less memory than is priced.
LESS_MEMORY = frozenset({"--use-precision-aware-optimizer", "--fp8-param-gather", "--distribute-saved-activations"})

# (option, kind, what the figures leave out). They do not stop a prediction; it says that they are left out.
UNMODELLED: tuple[tuple[str, str, str], ...] = (
    ("--empty-unused-memory-level", "int", "emptying the allocator's cache costs time and lowers fragmentation"),
    ("--enable-cuda-graph", "flag", "the static buffers of CUDA graphs are not priced, nor what they save of experts"),
    ("--external-cuda-graph", "flag", "CUDA graphs save launch time and hold static buffers"),
    ("--moe-shared-expert-overlap", "flag", "the shared experts are priced in series with the exchange"),
    ("--moe-expert-capacity-factor", "float", "experts are priced with all their tokens, none dropped or padded"),
    ("--moe-pad-expert-input-to-capacity", "flag", "experts are priced with all their tokens, none dropped or padded"),
    ("--moe-permute-fusion", "flag", "tokens are priced as put in order by two kernels each time"),
    ("--moe-router-padding-for-fp8", "flag", "in 8 bit, experts' tokens are priced as padded by a copy"),
    ("--moe-router-padding-for-quantization", "flag", "in 8 bit, experts' tokens are priced as padded by a copy"),
    ("--moe-use-legacy-grouped-gemm", "flag", "the newer grouped matrix product is priced"),
    ("--delay-wgrad-compute", "flag", "weight gradients are priced where they usually run"),
    ("--defer-embedding-wgrad-compute", "flag", "the head's weight gradient is priced where it usually runs"),
    ("--overlap-param-gather-with-optimizer-step", "flag", "the optimizer and the gather are priced in series"),
    ("--no-gradient-accumulation-fusion", "off", "weight gradients are priced as fused into the fp32 buffer"),
    ("--no-masked-softmax-fusion", "off", "fused kernels are priced"),
    ("--no-bias-gelu-fusion", "off", "fused kernels are priced"),
    ("--no-bias-swiglu-fusion", "off", "fused kernels are priced"),
    ("--no-bias-dropout-fusion", "off", "fused kernels are priced"),
    ("--no-rope-fusion", "off", "fused kernels are priced"),
    ("--use-fused-weighted-squared-relu", "flag", "the usual kernels are priced"),
    ("--use-precision-aware-optimizer", "flag", "states are priced in fp32: memory is overestimated with smaller ones"),
    ("--use-torch-optimizer-for-cpu-offload", "flag", "the update on the CPUs is priced as a fused one"),
    ("--fp8-param-gather", "flag", "bf16 parameters are priced: memory and gathers are overestimated"),
    ("--first-last-layers-bf16", "flag", "all layers are priced in fp8"),
    ("--num-layers-at-start-in-bf16", "int", "all layers are priced in fp8"),
    ("--num-layers-at-end-in-bf16", "int", "all layers are priced in fp8"),
    ("--fp32-residual-connection", "flag", "residuals are priced in 16 bits: memory is underestimated"),
    ("--fp16-lm-cross-entropy", "flag", "the loss is priced in fp32"),
    ("--distribute-saved-activations", "flag", "checkpoints are priced whole on each TP rank: memory is overestimated"),
    ("--ddp-bucket-size", "int", "the usual gradient buckets are priced"),
    ("--ddp-pad-buckets-for-high-nccl-busbw", "flag", "the usual gradient buckets are priced"),
    ("--ddp-reduce-scatter-with-fp32-accumulation", "flag", "the usual reduce-scatter is priced"),
    ("--ddp-average-in-collective", "flag", "the usual reduction is priced"),
    ("--use-nccl-ub", "flag", "registered buffers are not priced"),
    ("--disable-symmetric-registration", "flag", "registered buffers are not priced"),
    ("--use-sharp", "flag", "in-network reduction is a property of the cluster file (in_network)"),
    ("--use-ring-exchange-p2p", "flag", "the usual pipeline transfers are priced"),
    ("--reuse-grad-buf-for-mxfp8-param-ag", "flag", "the buffer is priced apart"),
    ("--use-tp-pp-dp-mapping", "flag", "ranks are priced in the order tp-cp-ep-dp-pp"),
    ("--tp-comm-overlap-rs-dgrad", "flag", "TP overlap is priced as a whole"),
    ("--disable-tp-comm-overlap-ag", "off", "TP overlap is priced as a whole"),
    ("--disable-tp-comm-overlap-rs", "off", "TP overlap is priced as a whole"),
    ("--disable-tp-comm-bulk-dgrad", "off", "TP overlap is priced as a whole"),
    ("--disable-tp-comm-bulk-wgrad", "off", "TP overlap is priced as a whole"),
    ("--disable-tp-comm-split-ag", "off", "TP overlap is priced as a whole"),
    ("--disable-tp-comm-split-rs", "off", "TP overlap is priced as a whole"),
    ("--sft", "flag", "fine-tuning is priced as training on full sequences"),
)

# (option, kind, why a run with it cannot be priced).
REFUSED: tuple[tuple[str, str, str], ...] = (
    ("--use-torch-fsdp2", "flag", "torch FSDP2 inside Megatron is not modelled; --runtime fsdp plans FSDP2 itself"),
    ("--hybrid-override-pattern", "text", "hybrid models are not read from options; plan one from its config.json"),
    ("--hybrid-layer-pattern", "text", "hybrid models are not read from options; plan one from its config.json"),
    ("--is-hybrid-model", "flag", "hybrid models are not read from options; plan one from its config.json"),
    ("--hybrid-attention-ratio", "float", "hybrid models are not read from options; plan one from its config.json"),
    ("--hybrid-mlp-ratio", "float", "hybrid models are not read from options; plan one from its config.json"),
    ("--mamba-state-dim", "int", "hybrid models are not read from options; plan one from its config.json"),
    ("--mamba-head-dim", "int", "hybrid models are not read from options; plan one from its config.json"),
    ("--mamba-num-groups", "int", "hybrid models are not read from options; plan one from its config.json"),
    ("--mamba-num-heads", "int", "hybrid models are not read from options; plan one from its config.json"),
    ("--spec", "texts", "a custom model specification is code, which is not run"),
    ("--heterogeneous-layers-config-path", "text", "layers that differ one by one are not read"),
    ("--heterogeneous-layers-config-encoded-json", "text", "layers that differ one by one are not read"),
    ("--retro-add-retriever", "flag", "Retro models are not modelled"),
    ("--retro-project-dir", "text", "Retro models are not modelled"),
    ("--encoder-num-layers", "int", "encoder-decoder models are not modelled"),
    ("--decoder-num-layers", "int", "encoder-decoder models are not modelled"),
    ("--encoder-seq-length", "int", "encoder-decoder models are not modelled"),
    ("--decoder-seq-length", "int", "encoder-decoder models are not modelled"),
    ("--encoder-tensor-model-parallel-size", "int", "encoder-decoder models are not modelled"),
    ("--encoder-pipeline-model-parallel-size", "int", "encoder-decoder models are not modelled"),
    ("--pipeline-model-parallel-split-rank", "int", "encoder-decoder models are not modelled"),
    ("--vision-pretraining", "flag", "vision models are not modelled"),
    ("--perform-rl-step", "flag", "reinforcement learning is not modelled"),
    ("--use-legacy-models", "flag", "the legacy models keep other activations than Megatron-Core's"),
    ("--skip-train", "flag", "this run does not train"),
    ("--batch-size", "int", "Megatron-LM no longer takes it; use --micro-batch-size"),
    ("--warmup", "int", "Megatron-LM no longer takes it; use --lr-warmup-fraction"),
    ("--model-parallel-size", "int", "Megatron-LM no longer takes it; use --tensor-model-parallel-size"),
    ("--checkpoint-activations", "flag", "Megatron-LM no longer takes it; use --recompute-granularity full"),
    # Of 2021 and 2022, from memory; the release read has none of them.
    ("--checkpoint-num-layers", "int", "Megatron-LM no longer takes it; use --recompute-num-layers"),
    (
        "--activations-checkpoint-method",
        "text",
        "Megatron-LM no longer takes it; use --recompute-granularity full and --recompute-method",
    ),
    ("--activations-checkpoint-num-layers", "int", "Megatron-LM no longer takes it; use --recompute-num-layers"),
)
