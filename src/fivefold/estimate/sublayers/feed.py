"""Dense feed-forward networks, which shared experts are too."""

from __future__ import annotations

import numpy as np

from fivefold.estimate.ledger import Ledger, Module, Saved, Stream, Working
from fivefold.estimate.sublayers.linears import LinearWriter
from fivefold.model.spec import FeedForward


class FeedWriter(LinearWriter):
    def _feed_forward(self, ledger: Ledger, feed: FeedForward) -> None:
        self._mlp(ledger, "mlp", "mlp", feed.ffn, feed.gated, feed.bias)

    def _mlp(self, ledger: Ledger, name: str, module: Module, ffn: int, gated: bool, bias: bool) -> None:
        s = self.shard
        width = ffn / s.tp
        inputs = 2 if gated else 1
        self._column_parallel(ledger, f"{name}.fc1", module, inputs * width, bias=bias)
        self._separate(ledger, f"{name}.fc1 input", module, inputs)
        act = self.element_bytes * s.tokens * width
        self._activation(ledger, name, module, module, act, inputs)
        self._row_parallel(ledger, f"{name}.fc2", module, width, bias=bias, ends_block=True)
        grad_out = self.element_bytes * s.norm_tokens * self.hidden
        gathered = np.where(s.sp, self.element_bytes * s.tokens * self.hidden, 0)
        ledger.working.append(Working(f"gradient of {name}.fc1 output", grad_out + gathered + inputs * act))

    def _activation(
        self,
        ledger: Ledger,
        name: str,
        module: Module,
        act_module: Module,
        act: np.ndarray,
        inputs: int,
        *,
        in_products: bool = False,
    ) -> None:
        """The non-linearity between two projections: `act` bytes out of `inputs` times as many in.

        in_products: the products' kernels do it, and move nothing for it.
        """
        extra = 0 if self.runtime.fused_glu or inputs == 1 else 1
        if not in_products:
            ledger.streams.append(
                Stream(
                    f"{name}.activation",
                    module,
                    (inputs + 1 + 2 * extra) * act,
                    (2 * inputs + 1 + 4 * extra) * act,
                    1 + extra,
                    1 + 2 * extra,
                    also=act_module if act_module != module else None,
                )
            )
        ledger.saved.append(Saved(f"{name}.fc1 output", module, inputs * act))
        if extra:
            ledger.saved.append(Saved(f"{name}.activated gate", module, act))
        ledger.saved.append(Saved(f"{name}.fc2 input", act_module, act * self.linear_input_bytes / self.element_bytes))
