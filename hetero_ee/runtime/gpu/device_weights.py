"""Weights on a GPU: the same bytes as in memory and on disk, copied and not repacked."""

from typing import Any

from hetero_ee.weights.weight import TileWeight


def tile_matrix(weight: TileWeight, device: Any) -> Any:
    """The weight as the GPU kernels take it, a hetero_ee_kernels.tile_matrix.TileMatrix."""
    from hetero_ee_kernels.tile_matrix import TileMatrix

    tiles, scales = weight.tiles.to(device), weight.scales.to(device)
    return TileMatrix(tiles, scales, weight.exponent, weight.codebook, weight.n_rows)
