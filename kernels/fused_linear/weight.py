"""The weight of a linear layer, dense or quantised, as the products take it."""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix [N, K] that rows are multiplied with, transposed.

    Attributes:
        array: [N, K], or packed as in ``mx.quantize``.
        scales, biases: [N, K / group_size], or None when dense.
        group_size, bits: Of the quantisation; 0 when dense.
    """

    array: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    group_size: int = 0
    bits: int = 0

    @staticmethod
    def of(module: nn.Module) -> "Weight":
        """The weight of an ``nn.Linear`` or an affine ``nn.QuantizedLinear``."""
        if "scales" not in module:
            return Weight(module.weight)
        return Weight(module.weight, module.scales, module.get("biases"), module.group_size, module.bits)

    @staticmethod
    def stack(weights: "list[Weight]") -> "Weight":
        """Weights of one kind over each other: one product gives all their outputs side by side."""
        first = weights[0]

        def join(name: str) -> mx.array | None:
            parts = [getattr(weight, name) for weight in weights]
            return None if parts[0] is None else mx.concatenate(parts)

        array = join("array")
        assert array is not None
        return Weight(array, join("scales"), join("biases"), first.group_size, first.bits)

    @property
    def outputs(self) -> int:
        return self.array.shape[0]

    @property
    def kind(self) -> tuple[int, int, mx.Dtype]:
        """Equal for weights that can be stacked, if they are equally wide."""
        return self.group_size, self.bits, self.array.dtype

    def arrays(self) -> list[mx.array]:
        return [array for array in (self.array, self.scales, self.biases) if array is not None]
