"""A loaded target: one ragged forward with taps, and what other services learn about it."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from services.speculation.errors import AerieError, Reason
from services.speculation.messages import Tap, TargetInfo
from services.targets.compiled import CompiledForward
from services.targets.kv_rows import KVRows, round_to_doubles, round_to_steps
from services.targets.ragged import RaggedBatch, SessionRows
from services.targets.seams import Recorder
from services.targets.tokenizer import TokenizerFiles


@dataclass(frozen=True, eq=False)
class Forward:
    """Lazy results of one ragged forward.

    Attributes:
        logits: [selected rows, V], in the order of the sessions; None when no row asked for logits.
        taps: Per tap, the residual stream [rows, hidden] of every row.
    """

    logits: mx.array | None
    taps: dict[Tap, mx.array]


class Target:
    """mlx-lm's own model behind the seams. Use on the device thread only.

    Args:
        model: With its seams installed.
        recorder: From ``seams.install``.
        info: What it is.
        tokenizer: Its tokenizer as data.
        compiled: Runs single trees, where compiling pays; None runs everything as a ragged batch.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        info: TargetInfo,
        tokenizer: TokenizerFiles,
        compiled: CompiledForward | None = None,
    ) -> None:
        self.model = model
        self.info = info
        self.tokenizer = tokenizer
        self._recorder = recorder
        self._compiled = compiled
        self._kv_bytes_per_row: int | None = None

    @property
    def kv_bytes_per_row(self) -> int:
        """Keys and values of one position over all layers. Runs one row the first time."""
        if self._kv_bytes_per_row is None:
            kv = self.new_kv()
            self.forward([SessionRows.chunk(kv, [0], "none")])
            self._kv_bytes_per_row = kv.nbytes // self.kv_capacity(1)
        return self._kv_bytes_per_row

    def kv_capacity(self, rows: int) -> int:
        """Positions that a cache allocates to hold ``rows``."""
        return round_to_doubles(rows) if self._compiled else round_to_steps(rows)

    def new_kv(self) -> KVRows:
        return KVRows(len(self.model.layers), self.kv_capacity)

    def forward(self, sessions: Sequence[SessionRows], taps: frozenset[Tap] = frozenset()) -> Forward:
        """Run all rows of all sessions in one batch; their keys and values become scratch rows.

        Args:
            sessions: At least one; each with its own cache.
            taps: What to record, for every row.
        """
        if self._compiled and len(sessions) == 1 and self._compiled.takes(sessions[0]):
            return Forward(*self._compiled(sessions[0], taps))
        batch = RaggedBatch(sessions)
        chosen = batch.logit_rows()
        rows = None if chosen is None else mx.array(chosen)
        # Without a single row for the head, run it on one: cheaper than a second forward path.
        self._recorder.begin(taps, mx.array([0]) if rows is not None and rows.size == 0 else rows)
        try:
            logits = self.model(batch.tokens, cache=batch.caches(len(self.model.layers)))[0]
            recorded = self._recorder.taps
        finally:
            self._recorder.begin(frozenset(), None)
        return Forward(None if rows is not None and rows.size == 0 else logits, recorded)

    def tensor(self, name: str) -> mx.array:
        """A weight that drafters share: "embed_tokens" or "lm_head" [V, hidden], dequantised, or "final_norm" [hidden].

        Raises:
            AerieError: INVALID_ARGUMENT for another name.
        """
        decoder = next(m for m in self.model.modules() if "embed_tokens" in m)
        if name == "embed_tokens":
            return dense_weight(decoder["embed_tokens"])
        if name == "lm_head":
            head = next((m["lm_head"] for m in self.model.modules() if "lm_head" in m), decoder["embed_tokens"])
            return dense_weight(head)
        if name == "final_norm" and "norm" in decoder and "weight" in decoder["norm"]:
            return decoder["norm"].weight
        raise AerieError(Reason.INVALID_ARGUMENT, f"no shared tensor {name!r}")


def dense_weight(module: nn.Module) -> mx.array:
    """The weight of a linear layer or embedding, dequantised if it is packed."""
    if "scales" not in module:
        return module.weight
    return mx.dequantize(
        module.weight, module.scales, module.get("biases"), group_size=module.group_size, bits=module.bits
    )
