"""What the tests of GPU operations on tiles share: matrices with everything a store may hold, and the error measure."""

from typing import Any

import torch

from hetero_ee_kernels.tile_matrix import TileMatrix
from tests.gpu_support import DEVICE, random

CODEBOOKS: dict[str, tuple[int, ...] | None] = {
    "linear": tuple(range(-8, 8)),
    "codebook": (-128, -97, -70, -54, -40, -27, -16, -5, 0, 9, 28, 40, 54, 70, 90, 127),
    "int8": None,
    "zeros": tuple(range(-8, 8)),
    "int5": None,
    "int5 zeros": None,
    "int6": None,
}
KINDS = tuple(CODEBOOKS)
VOCABULARY_KINDS = KINDS[:3]  # of embeddings and heads
EXPONENT = -9


def random_matrix(kind: str, shape: tuple[int, int], seed: int = 0, *, n_terms: int = 1) -> TileMatrix:
    """Any code in any place, padding included; scales of both signs, some zero."""
    n_blocks, n_groups = -(-shape[0] // 16), -(-shape[1] // 32)
    generator = torch.Generator().manual_seed(seed)
    codebook = CODEBOOKS[kind]
    size = (n_blocks, n_groups, {"int5": 320, "int5 zeros": 320, "int6": 384, "int8": 512}.get(kind, 256))
    tiles = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    scales = torch.randn((n_blocks, n_groups, 16), generator=generator).half()
    scales[torch.rand(scales.shape, generator=generator) < 0.02] = 0
    if kind.endswith("zeros") or kind == "int6":
        scales = torch.cat([scales, (torch.randn(scales.shape, generator=generator) * 5).half()], 2)
    tiles = tiles.view(torch.int8) if kind == "int8" else tiles
    return TileMatrix(tiles.to(DEVICE), scales.to(DEVICE), EXPONENT, codebook, shape[0], n_terms)


def activations(seed: int, m: int, n_columns: int) -> torch.Tensor:
    """fp32 (m, n_columns) with outlier features, as large models have them."""
    x = random(seed, m, n_columns)
    x[:, ::100] *= 20
    return x


def nmse(found: Any, expected: torch.Tensor) -> float:
    """Squared error over squared size, in float64; NaN where something is."""
    found, expected = found.double(), expected.double()
    return float((found - expected).square().sum() / expected.square().sum().clamp(min=1e-300))
