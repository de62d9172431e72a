"""The ledgers of a Transformer block, operation by operation; estimate/items.py has what lies beside the blocks.

Bytes per element: activations are 2 (bf16, fp16) or 4 (fp32); under the fp8 recipe the inputs of linear layers are
saved in fp8, 1 byte. What is saved follows the runtime's own kernels: Transformer Engine saves a norm's input and
output, rotated queries and keys, values, the attention output, both inputs of the gate and its product; eager PyTorch
saves the activated gate besides. The sums were checked against allocations of published Megatron-LM runs
(docs/accuracy.md).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fivefold.estimate.ledger import Attend, Exchange, Gemm, Ledger, Module, Saved, Stream, Weight, Working
from fivefold.estimate.shard import Shard
from fivefold.layout.workload import QUANTISED, Workload
from fivefold.model.spec import Attention, Block, Experts, FeedForward, LatentAttention, ModelSpec
from fivefold.runtime import Profile

_SINGLE = 4  # bytes of an fp32 element


class BlockWriter:
    """Writes ledgers for one model, workload and runtime over one set of keys."""

    def __init__(self, model: ModelSpec, work: Workload, runtime: Profile, shard: Shard) -> None:
        self.model = model
        self.work = work
        self.runtime = runtime
        self.shard = shard
        self.hidden = model.hidden
        self.element_bytes = work.compute_bytes
        # The fp8 recipes of Transformer Engine quantise a linear's input once and keep the quantised copy; torchao's
        # keep the input as it came.
        quantised = work.precision in QUANTISED and runtime.fp8_saves_inputs
        self.linear_input_bytes = 1 if quantised else self.element_bytes

    # ---------------------------------------------------------------- blocks

    def block(self, block: Block) -> Ledger:
        """One Transformer block: norm, mixer, residual, norm, feed-forward, residual."""
        s = self.shard
        ledger = Ledger(name="block", keys=len(s), input_bytes=self.element_bytes * s.norm_tokens * self.hidden)
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
        ledger.streams.append(
            Stream(name, module, 2 * self.element_bytes * elements, 3 * self.element_bytes * elements)
        )
        ledger.saved.append(Saved(f"{name}.input", "mixer", self.element_bytes * elements))
        ledger.saved.append(Saved(f"{name}.output", module, self.linear_input_bytes * elements))

    def _residual(self, ledger: Ledger, name: str) -> None:
        elements = self.shard.norm_tokens * self.hidden
        ledger.streams.append(
            Stream(name, "mixer", 3 * self.element_bytes * elements, 3 * self.element_bytes * elements)
        )

    def _attention(self, ledger: Ledger, mixer: Attention) -> None:
        s, h = self.shard, self.hidden
        heads = mixer.heads / s.tp
        kv_heads = np.maximum(mixer.kv_heads / s.tp, 1)  # replicated when tp exceeds them
        q, kv = heads * mixer.head_dim, kv_heads * mixer.head_dim
        self._column_parallel(ledger, "qkv_proj", "mixer", q + 2 * kv, bias=mixer.qkv_bias)
        if mixer.qk_norm:
            ledger.weights.append(Weight("qk_norm", 2 * mixer.head_dim, matrix=False))
            moved = self.element_bytes * s.tokens * (q + kv)
            ledger.streams.append(Stream("qk_norm", "mixer", 2 * moved, 3 * moved, 2, 2))
            ledger.saved.append(Saved("qk_norm.input", "mixer", moved))
        if mixer.rope:
            moved = self.element_bytes * s.tokens * (q + kv)
            ledger.streams.append(Stream("rotary", "mixer", 2 * moved, 2 * moved, 2, 2))
        ledger.saved.append(Saved("query_key_value", "mixer", self.element_bytes * s.tokens * (q + 2 * kv)))
        self._core_attention(ledger, heads, mixer.head_dim, mixer.head_dim, kv_heads, mixer.window)
        self._row_parallel(ledger, "out_proj", "mixer", q, bias=mixer.out_bias)
        ledger.working.append(
            Working(
                "gradients of query, key, value", self.element_bytes * (s.tokens * (2 * q + 2 * kv) + s.norm_tokens * h)
            )
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
        moved = self.element_bytes * s.tokens * heads * 2 * qk
        ledger.streams.append(Stream("rotary_and_concatenate", "mla_up_proj", 2 * moved, 2 * moved, 2, 2))
        ledger.saved.append(
            Saved("query_key_value", "mla_up_proj", self.element_bytes * s.tokens * heads * (2 * qk + v))
        )
        self._core_attention(ledger, heads, qk, v, heads, None)
        self._row_parallel(ledger, "out_proj", "mixer", heads * v, bias=mixer.bias)
        ledger.working.append(
            Working(
                "gradients of query, key, value",
                self.element_bytes * (s.tokens * heads * (2 * qk + 2 * v) + s.norm_tokens * h),
            )
        )

    def _latent_norm(self, ledger: Ledger, name: str, width: int) -> None:
        elements = self.shard.norm_tokens * width
        ledger.weights.append(Weight(name, width, matrix=False))
        ledger.streams.append(
            Stream(name, "mixer", 2 * self.element_bytes * elements, 3 * self.element_bytes * elements)
        )
        ledger.saved.append(Saved(f"{name}.input", "mixer", self.element_bytes * elements))
        ledger.saved.append(Saved(f"{name}.output", "mixer", self.linear_input_bytes * elements))

    def _up_projection(self, ledger: Ledger, name: str, width: int, out: np.ndarray) -> None:
        """A column-parallel projection from a latent; its gathered input is small beside the hidden state."""
        s = self.shard
        ledger.weights.append(Weight(name, width * out, factored=width + out))
        ledger.gemms.append(Gemm(name, "mla_up_proj", s.tokens, out, width))
        self._gather_for_column(ledger, name, self.element_bytes * s.tokens * width, "mla_up_proj")

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
        seq, unfused = self.work.seq_len, self.work.attention == "unfused"
        pairs = seq if unfused else self._pairs(window)
        per_pair = 2 * heads * (qk_dim + v_dim)
        scores = s.tokens * heads * seq if unfused else 0
        ledger.attends.append(
            Attend(
                "core_attention",
                s.tokens * pairs * per_pair,
                # Each step of a ring sees one rank's keys only, in a kernel of its own.
                np.where(s.ulysses, seq, seq / s.cp) if window is None else min(window, seq),
                qk_dim,
                scores,
            )
        )
        if unfused:
            # Korthikanti et al. 2022, section 4: softmax's output, dropout's mask and its output.
            ledger.saved.append(Saved("attention scores", "core_attn", 5 * scores))
        ledger.saved.append(Saved("attention_output", "mixer", self.element_bytes * s.tokens * heads * v_dim))
        ledger.saved.append(Saved("log_sum_exp", "core_attn", _SINGLE * s.tokens * heads))
        self._context_exchanges(ledger, self.element_bytes * s.tokens * heads, qk_dim, v_dim, kv_heads / heads)

    def _pairs(self, window: int | None) -> float:
        """Keys per query that a flash kernel works through on average."""
        seq = self.work.seq_len
        return seq / 2 if window is None or window >= seq else window * (1 - window / (2 * seq))

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
        joins = ring * (s.cp - 1) * (unit / self.element_bytes)
        ledger.streams.append(
            Stream(
                "ring merge",
                "core_attn",
                joins * v_dim * (self.element_bytes + 2 * _SINGLE),
                joins * (qk_dim + kv_ratio * (qk_dim + v_dim)) * (self.element_bytes + 2 * _SINGLE),
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
        act = self.element_bytes * s.tokens * width
        self._activation(ledger, name, module, module, act, inputs)
        self._row_parallel(ledger, f"{name}.fc2", module, width, bias=bias, ends_block=True)
        grad_out = self.element_bytes * s.norm_tokens * self.hidden
        gathered = np.where(s.sp, self.element_bytes * s.tokens * self.hidden, 0)
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
        ledger.saved.append(Saved(f"{name}.fc2 input", act_module, act * self.linear_input_bytes / self.element_bytes))

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
        ledger.gemms.append(Gemm("router", "moe", s.norm_tokens, feed.num_experts, h, sixteen_bit=True))
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
        moved = self.element_bytes * (sent + received) * h
        ledger.streams.append(Stream("permute", "moe", 2 * moved, 2 * moved, 4, 4))
        ledger.streams.append(Stream("unpermute", "moe", 2 * moved, 2 * moved, 4, 4))
        self._expert_exchanges(ledger, sent, received)
        ledger.saved.append(Saved("experts.fc1 input", "moe", self.linear_input_bytes * received * h))
        rows = received / local
        ledger.gemms.append(Gemm("experts.fc1", "moe", rows, inputs * width, h, groups=local, grouped=True))
        act = self.element_bytes * received * width
        self._activation(ledger, "experts", "moe", "moe_act", act, inputs)
        ledger.gemms.append(Gemm("experts.fc2", "moe", rows, h, width, groups=local, grouped=True, ends_block=True))
        ledger.working.append(
            Working("gradient of experts.fc1 output", self.element_bytes * received * h + inputs * act)
        )
        ledger.working.append(
            Working("dispatched and permuted gradients", self.element_bytes * (sent + 2 * received) * h)
        )
        if feed.shared_ffn:
            self._mlp(ledger, "shared_experts", "moe", feed.shared_ffn, feed.gated, bias=False)

    def _expert_exchanges(self, ledger: Ledger, sent: np.ndarray, received: np.ndarray) -> None:
        s, h = self.shard, self.hidden
        imbalance = np.where(s.ep > 1, self.work.moe_imbalance, 1.0)
        a2a = self.element_bytes * sent * h * imbalance
        gathered = np.where(s.etp > 1, self.element_bytes * received * h, 0.0)
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
        self._gather_for_column(ledger, name, self.element_bytes * s.tokens * h, module)

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
        full = self.element_bytes * s.tokens * h
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


def _part(module: Module) -> Literal["mixer", "feed"]:
    """The sublayer that an operation's recomputation module belongs to."""
    return "feed" if module in ("mlp", "moe") else "mixer"
