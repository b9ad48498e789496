"""What calibration knows of a model's FFNs: how often each neuron is active."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero_ee.weights.tiles import TILE_COLUMNS


@dataclass(frozen=True, slots=True, eq=False)
class NeuronStatistics:
    """source: where it comes from, for people. frequencies: (n_layers, ffn_size), the share of tokens for which each
    neuron is active, 0 to 1. block_neurons: neurons that are placed together, a multiple of the tiles' columns that
    divides the FFN. Raises ValueError.
    """

    source: str
    frequencies: Any
    block_neurons: int = TILE_COLUMNS

    def __post_init__(self) -> None:
        found = np.asarray(self.frequencies)
        if found.ndim != 2 or not found.size or found.dtype.kind != "f":
            raise ValueError(f"frequencies are {found.dtype} of shape {found.shape}, expected floats, layers x neurons")
        if not np.all((found >= 0) & (found <= 1)):  # false for NaN too
            raise ValueError("frequencies must be 0 to 1")
        if self.block_neurons < 1 or self.block_neurons % TILE_COLUMNS or found.shape[1] % self.block_neurons:
            raise ValueError(
                f"block_neurons is {self.block_neurons}, expected a multiple of {TILE_COLUMNS} that divides "
                f"{found.shape[1]}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Layers, and neurons of a layer's FFN."""
        n_layers, n_neurons = np.shape(self.frequencies)
        return n_layers, n_neurons

    def order(self, layer: int) -> Any:
        """Neurons of the layer, the most often active first; of two alike the one with the lower number."""
        return np.argsort(-np.asarray(self.frequencies[layer], np.float64), kind="stable")

    def active_behind(self, layer: int) -> Any:
        """For 0, 1, ... all blocks in that order: neurons behind them that a token needs, on average."""
        active = np.sort(self.frequencies[layer])[::-1].astype(np.float64)
        blocks = active.reshape(-1, self.block_neurons).sum(axis=1)
        return np.concatenate([np.cumsum(blocks[::-1])[::-1], [0.0]])
