"""The ledgers of a Transformer block and of the items beside the blocks, operation by operation.

Bytes per element: activations are 2 (bf16, fp16); under the fp8 recipe the inputs of linear layers are saved in fp8,
1 byte. What is saved follows the runtime's own kernels: Transformer Engine saves a norm's input and output, rotated
queries and keys, values, the attention output, both inputs of the gate and its product; eager PyTorch saves the
activated gate besides. The sums were checked against allocations of published Megatron-LM runs (docs/accuracy.md).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fivefold.estimate.ledger import Attend, Exchange, Gemm, Ledger, Module, Saved, Stream, Weight, Working
from fivefold.estimate.shard import Shard
from fivefold.layout.workload import Workload
from fivefold.model.spec import Attention, Block, Experts, FeedForward, LatentAttention, ModelSpec
from fivefold.runtime import Profile

_HALF = 2  # bytes of a bf16 or fp16 element
_SINGLE = 4  # bytes of an fp32 element


class BlockWriter:
    """Writes ledgers for one model, workload and runtime over one set of keys."""

    def __init__(self, model: ModelSpec, work: Workload, runtime: Profile, shard: Shard) -> None:
        self.model = model
        self.work = work
        self.runtime = runtime
        self.shard = shard
        self.hidden = model.hidden
        # The fp8 recipes of Transformer Engine quantise a linear's input once and keep the quantised copy; torchao's
        # keep the input as it came.
        quantised = work.precision == "fp8" and runtime.fp8_saves_inputs
        self.linear_input_bytes = 1 if quantised else _HALF

    # ---------------------------------------------------------------- blocks

    def block(self, block: Block) -> Ledger:
        """One Transformer block: norm, mixer, residual, norm, feed-forward, residual."""
        s = self.shard
        ledger = Ledger(name="block", keys=len(s), input_bytes=_HALF * s.norm_tokens * self.hidden)
        # A norm that is fused into the linear after it cannot be recomputed alone; with the dense feed-forward it can.
        fused = self.runtime.norms_fused_into_linears
        grouped, dense = isinstance(block.mixer, Attention), isinstance(block.feed, FeedForward)
        self._norm(ledger, "input_norm", block, "mixer" if fused and grouped else "layernorm")
        if isinstance(block.mixer, Attention):
            self._attention(ledger, block.mixer)
        else:
            self._latent_attention(ledger, block.mixer)
        self._residual(ledger, "mixer_residual")
        self._norm(ledger, "feed_norm", block, "mlp" if fused and dense else "layernorm")
        if isinstance(block.feed, FeedForward):
            self._feed_forward(ledger, block.feed)
        else:
            self._experts(ledger, block.feed)
        self._residual(ledger, "feed_residual")
        return ledger

    def _norm(self, ledger: Ledger, name: str, block: Block, module: Module) -> None:
        elements = self.shard.norm_tokens * self.hidden
        ledger.weights.append(Weight(name, self.hidden * (2 if block.norm_bias else 1), matrix=False))
        ledger.streams.append(Stream(name, module, 2 * _HALF * elements, 3 * _HALF * elements))
        ledger.saved.append(Saved(f"{name}.input", "mixer", _HALF * elements))
        ledger.saved.append(Saved(f"{name}.output", module, self.linear_input_bytes * elements))

    def _residual(self, ledger: Ledger, name: str) -> None:
        elements = self.shard.norm_tokens * self.hidden
        ledger.streams.append(Stream(name, "mixer", 3 * _HALF * elements, 3 * _HALF * elements))

    def _attention(self, ledger: Ledger, mixer: Attention) -> None:
        s, h = self.shard, self.hidden
        heads = mixer.heads / s.tp
        kv_heads = np.maximum(mixer.kv_heads / s.tp, 1)  # replicated when tp exceeds them
        q, kv = heads * mixer.head_dim, kv_heads * mixer.head_dim
        self._column_parallel(ledger, "qkv_proj", "mixer", q + 2 * kv, bias=mixer.qkv_bias)
        if mixer.qk_norm:
            ledger.weights.append(Weight("qk_norm", 2 * mixer.head_dim, matrix=False))
            moved = _HALF * s.tokens * (q + kv)
            ledger.streams.append(Stream("qk_norm", "mixer", 2 * moved, 3 * moved, 2, 2))
            ledger.saved.append(Saved("qk_norm.input", "mixer", moved))
        if mixer.rope:
            moved = _HALF * s.tokens * (q + kv)
            ledger.streams.append(Stream("rotary", "mixer", 2 * moved, 2 * moved, 2, 2))
        ledger.saved.append(Saved("query_key_value", "mixer", _HALF * s.tokens * (q + 2 * kv)))
        self._core_attention(ledger, heads, mixer.head_dim, mixer.head_dim, kv_heads, mixer.window)
        self._row_parallel(ledger, "out_proj", "mixer", q, bias=mixer.out_bias)
        ledger.working.append(
            Working("gradients of query, key, value", _HALF * (s.tokens * (2 * q + 2 * kv) + s.norm_tokens * h))
        )

    def _latent_attention(self, ledger: Ledger, mixer: LatentAttention) -> None:
        s, h = self.shard, self.hidden
        heads = mixer.heads / s.tp
        qk, v = mixer.qk_head_dim, mixer.v_head_dim
        norm_tokens = s.norm_tokens
        if mixer.q_lora_rank is None:
            self._column_parallel(ledger, "q_proj", "mixer", heads * qk, bias=False)
        else:
            self._replicated(ledger, "q_down", h, mixer.q_lora_rank, norm_tokens, bias=mixer.bias)
            self._latent_norm(ledger, "q_latent_norm", mixer.q_lora_rank)
            self._up_projection(ledger, "q_up", mixer.q_lora_rank, heads * qk)
        latent = mixer.kv_lora_rank + mixer.qk_rope_head_dim
        self._replicated(ledger, "kv_down", h, latent, norm_tokens, bias=mixer.bias)
        self._latent_norm(ledger, "kv_latent_norm", mixer.kv_lora_rank)
        self._up_projection(ledger, "kv_up", mixer.kv_lora_rank, heads * (mixer.qk_nope_head_dim + v))
        moved = _HALF * s.tokens * heads * 2 * qk
        ledger.streams.append(Stream("rotary_and_concatenate", "mla_up_proj", 2 * moved, 2 * moved, 2, 2))
        ledger.saved.append(Saved("query_key_value", "mla_up_proj", _HALF * s.tokens * heads * (2 * qk + v)))
        self._core_attention(ledger, heads, qk, v, heads, None)
        self._row_parallel(ledger, "out_proj", "mixer", heads * v, bias=mixer.bias)
        ledger.working.append(
            Working("gradients of query, key, value", _HALF * (s.tokens * heads * (2 * qk + 2 * v) + s.norm_tokens * h))
        )

    def _latent_norm(self, ledger: Ledger, name: str, width: int) -> None:
        elements = self.shard.norm_tokens * width
        ledger.weights.append(Weight(name, width, matrix=False))
        ledger.streams.append(Stream(name, "mixer", 2 * _HALF * elements, 3 * _HALF * elements))
        ledger.saved.append(Saved(f"{name}.input", "mixer", _HALF * elements))
        ledger.saved.append(Saved(f"{name}.output", "mixer", self.linear_input_bytes * elements))

    def _up_projection(self, ledger: Ledger, name: str, width: int, out: np.ndarray) -> None:
        """A column-parallel projection from a latent; its gathered input is small beside the hidden state."""
        s = self.shard
        ledger.weights.append(Weight(name, width * out, factored=width + out))
        ledger.gemms.append(Gemm(name, "mla_up_proj", s.tokens, out, width))
        self._gather_for_column(ledger, name, _HALF * s.tokens * width, "mla_up_proj")

    def _core_attention(
        self,
        ledger: Ledger,
        heads: np.ndarray,
        qk_dim: int,
        v_dim: int,
        kv_heads: np.ndarray,
        window: int | None,
    ) -> None:
        s = self.shard
        seq = self.work.seq_len
        pairs = seq / 2 if window is None or window >= seq else window * (1 - window / (2 * seq))
        per_pair = 2 * heads * (qk_dim + v_dim)
        ledger.attends.append(
            Attend(
                "core_attention",
                s.tokens * pairs * per_pair,
                # Each step of a ring sees one rank's keys only, in a kernel of its own.
                np.where(s.ulysses, seq, seq / s.cp) if window is None else min(window, seq),
                qk_dim,
            )
        )
        ledger.saved.append(Saved("attention_output", "mixer", _HALF * s.tokens * heads * v_dim))
        ledger.saved.append(Saved("log_sum_exp", "core_attn", _SINGLE * s.tokens * heads))
        self._context_exchanges(ledger, _HALF * s.tokens * heads, qk_dim, v_dim, kv_heads / heads)

    def _context_exchanges(
        self, ledger: Ledger, unit: np.ndarray, qk_dim: int, v_dim: int, kv_ratio: np.ndarray
    ) -> None:
        """Ring attention passes keys and values around; Ulysses exchanges heads for sequence before and after."""
        s = self.shard
        if int(s.cp.max(initial=1)) == 1:
            return
        kv_bytes = unit * kv_ratio * (qk_dim + v_dim)
        ring = np.where(s.ulysses, 0.0, 1.0)
        a2a = np.where(s.ulysses & (s.cp > 1), 1.0, 0.0)
        steps = np.maximum(s.cp - 1, 1) * (s.cp > 1)
        ledger.exchanges += [
            Exchange("ring keys and values", "cp", "send", ring * kv_bytes, "forward", ring_steps=steps),
            Exchange(
                "ring keys, values and gradients", "cp", "send", 2 * ring * kv_bytes, "backward", ring_steps=steps
            ),
        ]
        # After each step the partial output (bf16) joins the running one (fp32); backward adds to fp32 gradients of
        # queries, and of keys and values as they pass.
        joins = ring * (s.cp - 1) * (unit / _HALF)
        ledger.streams.append(
            Stream(
                "ring merge",
                "core_attn",
                joins * v_dim * (_HALF + 2 * _SINGLE),
                joins * (qk_dim + kv_ratio * (qk_dim + v_dim)) * (_HALF + 2 * _SINGLE),
                2,
                3,
            )
        )
        moved = unit * (qk_dim + v_dim) + kv_bytes
        ledger.exchanges += [
            Exchange("heads for sequence", "cp", "all_to_all", a2a * moved, when) for when in ("forward", "backward")
        ]

    def _feed_forward(self, ledger: Ledger, feed: FeedForward) -> None:
        self._mlp(ledger, "mlp", "mlp", feed.ffn, feed.gated, feed.bias)

    def _mlp(self, ledger: Ledger, name: str, module: Module, ffn: int, gated: bool, bias: bool) -> None:
        s = self.shard
        width = ffn / s.tp
        inputs = 2 if gated else 1
        self._column_parallel(ledger, f"{name}.fc1", module, inputs * width, bias=bias)
        act = _HALF * s.tokens * width
        self._activation(ledger, name, module, module, act, inputs)
        self._row_parallel(ledger, f"{name}.fc2", module, width, bias=bias, ends_block=True)
        grad_out = _HALF * s.norm_tokens * self.hidden
        gathered = np.where(s.sp, _HALF * s.tokens * self.hidden, 0)
        ledger.working.append(Working(f"gradient of {name}.fc1 output", grad_out + gathered + inputs * act))

    def _activation(
        self, ledger: Ledger, name: str, module: Module, act_module: Module, act: np.ndarray, inputs: int
    ) -> None:
        """The non-linearity between two projections: `act` bytes out of `inputs` times as many in."""
        extra = 0 if self.runtime.fused_glu or inputs == 1 else 1
        ledger.streams.append(
            Stream(
                f"{name}.activation",
                module,
                (inputs + 1 + 2 * extra) * act,
                (2 * inputs + 1 + 2 * extra) * act,
                also=act_module if act_module != module else None,
            )
        )
        ledger.saved.append(Saved(f"{name}.fc1 output", module, inputs * act))
        if extra:
            ledger.saved.append(Saved(f"{name}.activated gate", module, act))
        ledger.saved.append(Saved(f"{name}.fc2 input", act_module, act * self.linear_input_bytes / _HALF))

    def _experts(self, ledger: Ledger, feed: Experts) -> None:
        s, h = self.shard, self.hidden
        local = feed.num_experts / s.ep
        inputs = 2 if feed.gated else 1
        width = feed.ffn / s.etp
        ledger.weights.append(Weight("router", h * feed.num_experts, factored=h + feed.num_experts, part="feed"))
        ledger.weights.append(
            Weight(
                "experts.fc1",
                local * h * inputs * width,
                expert=True,
                factored=local * (h + inputs * width),
                copies=local,
                part="feed",
            )
        )
        ledger.weights.append(
            Weight(
                "experts.fc2", local * h * width, expert=True, factored=local * (h + width), copies=local, part="feed"
            )
        )
        sent = s.norm_tokens * feed.top_k
        # The busiest rank of an expert-parallel group sets the pace and the peak; without ep nothing can be uneven.
        received = sent * s.etp * np.where(s.ep > 1, self.work.moe_imbalance, 1.0)
        ledger.gemms.append(Gemm("router", "moe", s.norm_tokens, feed.num_experts, h))
        ledger.streams.append(
            Stream(
                "routing",
                "moe",
                8 * _SINGLE * s.norm_tokens * feed.num_experts,
                4 * _SINGLE * s.norm_tokens * feed.num_experts,
                6,
                4,
            )
        )
        ledger.saved.append(Saved("router probabilities", "moe", 2 * _SINGLE * s.norm_tokens * feed.num_experts))
        moved = _HALF * (sent + received) * h
        ledger.streams.append(Stream("permute", "moe", 2 * moved, 2 * moved, 4, 4))
        ledger.streams.append(Stream("unpermute", "moe", 2 * moved, 2 * moved, 4, 4))
        self._expert_exchanges(ledger, sent, received)
        ledger.saved.append(Saved("experts.fc1 input", "moe", self.linear_input_bytes * received * h))
        rows = received / local
        ledger.gemms.append(Gemm("experts.fc1", "moe", rows, inputs * width, h, groups=local, grouped=True))
        act = _HALF * received * width
        self._activation(ledger, "experts", "moe", "moe_act", act, inputs)
        ledger.gemms.append(Gemm("experts.fc2", "moe", rows, h, width, groups=local, grouped=True, ends_block=True))
        ledger.working.append(Working("gradient of experts.fc1 output", _HALF * received * h + inputs * act))
        ledger.working.append(Working("dispatched and permuted gradients", _HALF * (sent + 2 * received) * h))
        if feed.shared_ffn:
            self._mlp(ledger, "shared_experts", "moe", feed.shared_ffn, feed.gated, bias=False)

    def _expert_exchanges(self, ledger: Ledger, sent: np.ndarray, received: np.ndarray) -> None:
        s, h = self.shard, self.hidden
        imbalance = np.where(s.ep > 1, self.work.moe_imbalance, 1.0)
        a2a = _HALF * sent * h * imbalance
        gathered = np.where(s.etp > 1, _HALF * received * h, 0.0)
        for when in ("forward", "backward"):
            ledger.exchanges += [
                Exchange("dispatch", "ep", "all_to_all", a2a, when, module="moe"),
                Exchange("combine", "ep", "all_to_all", a2a, when, module="moe"),
                Exchange("gather tokens", "etp", "all_gather", gathered, when, module="moe"),
                Exchange("scatter tokens", "etp", "reduce_scatter", gathered, when, module="moe"),
            ]

    # ---------------------------------------------------------------- linear layers and their collectives

    def _column_parallel(self, ledger: Ledger, name: str, module: Module, out: np.ndarray, *, bias: bool) -> None:
        s, h = self.shard, self.hidden
        ledger.weights.append(Weight(name, h * out, factored=h + out, part=_part(module)))
        if bias:
            ledger.weights.append(Weight(f"{name}.bias", out, matrix=False))
        ledger.gemms.append(Gemm(name, module, s.tokens, out, h))
        self._gather_for_column(ledger, name, _HALF * s.tokens * h, module)

    def _gather_for_column(self, ledger: Ledger, name: str, full: np.ndarray, module: Module) -> None:
        """Sequence parallelism gathers the input (again in backward, behind dgrad) and scatters its gradient behind
        wgrad; plain tensor parallelism all-reduces the input's gradient behind wgrad (Megatron-LM's linear layers)."""
        s = self.shard
        if int(s.tp.max(initial=1)) == 1:
            return
        with_sp = np.where(s.sp, full, 0.0)
        without = np.where(s.sp, 0.0, full)
        ledger.exchanges += [
            Exchange(f"gather {name} input", "tp", "all_gather", with_sp, "forward", module=module),
            Exchange(
                f"gather {name} input", "tp", "all_gather", with_sp, "backward", behind=(name, "dgrad"), module=module
            ),
            Exchange(
                f"scatter {name} gradient",
                "tp",
                "reduce_scatter",
                with_sp,
                "backward",
                behind=(name, "wgrad"),
                module=module,
            ),
            Exchange(
                f"reduce {name} gradient",
                "tp",
                "all_reduce",
                without,
                "backward",
                behind=(name, "wgrad"),
                module=module,
            ),
        ]

    def _row_parallel(
        self, ledger: Ledger, name: str, module: Module, width: np.ndarray, *, bias: bool, ends_block: bool = False
    ) -> None:
        s, h = self.shard, self.hidden
        ledger.weights.append(Weight(name, width * h, factored=width + h, part=_part(module)))
        if bias:
            ledger.weights.append(Weight(f"{name}.bias", h, matrix=False))
        ledger.gemms.append(Gemm(name, module, s.tokens, h, width, ends_block=ends_block))
        if int(s.tp.max(initial=1)) == 1:
            return
        full = _HALF * s.tokens * h
        ledger.exchanges += [
            Exchange(
                f"scatter {name} output", "tp", "reduce_scatter", np.where(s.sp, full, 0.0), "forward", module=module
            ),
            Exchange(
                f"gather {name} gradient", "tp", "all_gather", np.where(s.sp, full, 0.0), "backward", module=module
            ),
            Exchange(f"reduce {name} output", "tp", "all_reduce", np.where(s.sp, 0.0, full), "forward", module=module),
        ]

    def _replicated(self, ledger: Ledger, name: str, k: int, n: int, tokens: np.ndarray, *, bias: bool) -> None:
        """A small projection that every tensor-parallel rank holds whole and applies to its own tokens."""
        ledger.weights.append(Weight(name, k * n, factored=k + n))
        if bias:
            ledger.weights.append(Weight(f"{name}.bias", n, matrix=False))
        ledger.gemms.append(Gemm(name, "mixer", tokens, n, k))

    # ---------------------------------------------------------------- items beside the blocks

    def padded_vocab(self) -> np.ndarray:
        """Rows of the embedding after the runtime's padding, [K]."""
        multiple = self.runtime.vocab_multiple * self.shard.tp
        return np.ceil(self.model.vocab / multiple) * multiple

    def embedding(self) -> Ledger:
        """Token (and learned position) embedding, vocabulary-parallel."""
        s, h = self.shard, self.hidden
        ledger = Ledger(name="embedding", keys=len(s))
        rows = self.padded_vocab() / s.tp
        ledger.weights.append(Weight("embedding", rows * h, matrix=False, factored=rows + h))
        if self.model.learned_positions:
            ledger.weights.append(Weight("positions", self.model.learned_positions * h, matrix=False))
        out = _HALF * s.tokens * h
        ledger.streams.append(Stream("embedding lookup", "mixer", 2 * out, 2 * out, 2, 2))
        if int(s.tp.max(initial=1)) > 1:
            ledger.exchanges += [
                Exchange("scatter embedding output", "tp", "reduce_scatter", np.where(s.sp, out, 0.0), "forward"),
                Exchange("gather embedding gradient", "tp", "all_gather", np.where(s.sp, out, 0.0), "backward"),
                Exchange("reduce embedding output", "tp", "all_reduce", np.where(s.sp, 0.0, out), "forward"),
            ]
        if self.runtime.head_wgrad_placeholder:
            ledger.working.append(Working("gradient of embedding", _HALF * rows * h))
        return ledger

    def head(self) -> Ledger:
        """Final norm, output projection and cross-entropy; the kernel adds the projection's weight."""
        ledger = Ledger(name="head", keys=len(self.shard))
        self._final_norm(ledger)
        self._logits_and_loss(ledger)
        return ledger

    def _final_norm(self, ledger: Ledger) -> None:
        elements = self.shard.norm_tokens * self.hidden
        ledger.weights.append(
            Weight("final_norm", self.hidden * (2 if self.model.final_norm_bias else 1), matrix=False)
        )
        ledger.streams.append(Stream("final_norm", "head", 2 * _HALF * elements, 3 * _HALF * elements))
        ledger.saved.append(Saved("final_norm.input", "head", _HALF * elements))
        ledger.saved.append(Saved("final_norm.output", "head", _HALF * elements))

    def head_weight(self) -> np.ndarray:
        """Elements of the output projection per rank, [K]."""
        return self.padded_vocab() / self.shard.tp * self.hidden

    def _logits_and_loss(self, ledger: Ledger) -> None:
        s, h = self.shard, self.hidden
        columns = self.padded_vocab() / s.tp
        logits = s.tokens * columns
        ledger.gemms.append(Gemm("output_proj", "head", s.tokens, columns, h))
        self._gather_for_column(ledger, "output_proj", _HALF * s.tokens * h, "head")
        # Cast, row maximum, exponential with row sum; softmax minus target, cast.
        ledger.streams.append(Stream("cross_entropy", "head", 18 * logits, 14 * logits, 6, 4))
        if int(s.tp.max(initial=1)) > 1:
            per_token = np.where(s.tp > 1, _SINGLE * s.tokens, 0.0)
            for name in ("maximum", "target logit", "sum of exponentials"):
                ledger.exchanges.append(Exchange(f"loss {name}", "tp", "all_reduce", per_token, "forward"))
        # The larger of two moments: the loss (logits and what it computes from them) and the head's backward (gradient
        # of the logits, placeholder of the weight gradient, gathered input, its gradient whole and scattered).
        at_loss = self.runtime.loss_bytes_per_logit * logits
        at_backward = _HALF * logits
        if self.runtime.head_wgrad_placeholder:
            at_backward = at_backward + _HALF * columns * h
        gathered = np.where(s.sp, _HALF * s.tokens * h + _HALF * s.norm_tokens * h, 0.0)
        at_backward = at_backward + gathered + _HALF * s.tokens * h
        ledger.logits_bytes = np.maximum(at_loss, at_backward)

    def nothing(self, name: str) -> Ledger:
        """An item that the model does not have."""
        return Ledger(name=name, keys=len(self.shard))

    def mtp(self) -> Ledger:
        """One multi-token-prediction module (DeepSeek-V3, section 2.2): two norms, a 2h to h projection, one block of
        the last kind, and the shared head once more. Its embedding and head weights are the model's own."""
        s, h = self.shard, self.hidden
        ledger = self.block(self.model.runs[-1].block)
        ledger.name = "mtp"
        for name in ("mtp.hidden_norm", "mtp.embedding_norm"):
            elements = s.norm_tokens * h
            ledger.weights.append(Weight(name, h, matrix=False))
            ledger.streams.append(Stream(name, "mixer", 2 * _HALF * elements, 3 * _HALF * elements))
            ledger.saved.append(Saved(f"{name}.input", "mixer", _HALF * elements))
        ledger.weights.append(Weight("mtp.projection", 2 * h * h / s.tp, factored=2 * h + h / s.tp))
        ledger.gemms.append(Gemm("mtp.projection", "mixer", s.tokens, h / s.tp, 2 * h))
        ledger.saved.append(Saved("mtp.projection input", "mixer", 2 * self.linear_input_bytes * s.norm_tokens * h))
        ledger.streams.append(Stream("mtp embedding lookup", "mixer", 4 * s.tokens * h, 4 * s.tokens * h, 2, 2))
        self._final_norm(ledger)
        self._logits_and_loss(ledger)
        return ledger


def _part(module: Module) -> Literal["mixer", "feed"]:
    """The sublayer that an operation's recomputation module belongs to."""
    return "feed" if module in ("mlp", "moe") else "mixer"
