"""Make random weights in any model's shapes, to time the model without its real weights."""

import numpy as np
import torch
from torch import Tensor

from hetero_ee.layers.tensors import MATRIX_LAYOUTS, TensorRole, TensorSpec, is_in_rows
from hetero_ee.models.blocks import all_tensors
from hetero_ee.models.draft_head import stored_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.model_weights import ModelWeights, is_quantized, with_terms
from hetero_ee.weights.rows import RowWeight, row_sizes
from hetero_ee.weights.tiles import SCALES_A_TILE, TILE_BYTES, TILE_ROWS, ZEROS, ZEROS_5, tile_grid
from hetero_ee.weights.weight import LINEAR_CODEBOOK, TileWeight

RANDOM = "random"  # name in place of a quantizer
BLOCK_BYTES = 2**22 - 3  # of random bytes, repeated; odd, so that no two tiles of a matrix begin alike
FLOAT_MATRICES = (".router", ".shared_gate")  # random, since equal rows would choose the same experts for all tokens
# A codebook like fitted ones, so that the kernels do the usual work.
CODEBOOK = (-32, -23, -18, -14, -10, -7, -4, -1, 1, 4, 7, 10, 14, 18, 22, 28)
# Approximate, of entries.
ROOT_MEAN_SQUARES = {"int4": 16.0, ZEROS: 4.6, "int5": 9.2, ZEROS_5: 9.2, "int6": 18.5, "int8": 64.0}


def random_weights(spec: ModelSpec, vocabulary: str = "int8") -> ModelWeights:
    """Return random int4 tiles, scaled so that hidden states keep their size, with norms of 1 and biases of 0.

    `vocabulary` is the layout of embedding and head, int4 or int8. Filling 3.8 GB needs about two seconds.
    """
    block, generator = _random_block(), torch.Generator().manual_seed(0)
    weights = ModelWeights({}, {}, RANDOM)
    for tensor in all_tensors(stored_blocks(spec)):
        if is_quantized(tensor.role):
            plain = vocabulary if tensor.role is TensorRole.VOCABULARY else "int4"
            layout = MATRIX_LAYOUTS.get(tensor.role, plain)
            random = _random_rows(tensor, block) if is_in_rows(tensor.role) else _random_tiles(tensor, layout, block)
            weights.matrices[tensor.name] = random
        elif tensor.name.endswith(FLOAT_MATRICES):
            drawn = torch.randn(tensor.shape, generator=generator)
            weights.vectors[tensor.name] = drawn / tensor.shape[1] ** 0.5
        else:
            is_scale = tensor.role is TensorRole.VECTOR and not tensor.name.endswith("bias")
            weights.vectors[tensor.name] = torch.full(tensor.shape, 1.0 if is_scale else 0.0)
    return with_terms(weights, spec.activation_terms)


def random_rows(tensor: TensorSpec) -> RowWeight:
    """Return random weights, in rows, of an FFN's neurons."""
    return _random_rows(tensor, _random_block())


def _random_block() -> Tensor:
    return torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def _random_tiles(tensor: TensorSpec, layout: str, block: Tensor) -> TileWeight:
    codebook = {"int4": CODEBOOK, ZEROS: LINEAR_CODEBOOK}.get(layout)
    n_rows, n_columns = tensor.shape
    grid = tile_grid(n_rows, n_columns)
    tiles = _random_bytes(block, *grid, TILE_BYTES[layout])
    scale = 1 / (ROOT_MEAN_SQUARES[layout] * n_columns**0.5)
    scales = torch.from_numpy(np.full((*grid, SCALES_A_TILE[layout]), scale * 2**14, np.float16))
    if layout in (ZEROS, ZEROS_5):
        scales[..., TILE_ROWS:] = -0.5  # zero points: the mean of the codes
    return TileWeight(
        tiles=tiles.view(torch.int8) if layout == "int8" else tiles,
        scales=scales,
        exponent=-14,
        codebook=codebook,
        n_rows=n_rows,
        n_columns=n_columns,
    )


def _random_rows(tensor: TensorSpec, block: Tensor) -> RowWeight:
    """Fill rows with random codes. Down is summed over its rows, so its scale depends on their number."""
    n_rows, n_columns = tensor.shape
    codes_bytes, scales_bytes = row_sizes(1, n_columns)
    codes = _random_bytes(block, n_rows, codes_bytes)
    scale = 1 / (ROOT_MEAN_SQUARES["int4"] * (n_rows if tensor.name.endswith("down") else n_columns) ** 0.5)
    scales = torch.full((n_rows, scales_bytes // 2), scale * 2**14, dtype=torch.float16)
    return RowWeight(codes, scales, -14, CODEBOOK, n_columns)


def _random_bytes(block: Tensor, *shape: int) -> Tensor:
    """Return the repeated block in NumPy's memory: huge pages, as a mapped store has, which torch does not ask for."""
    filled = torch.from_numpy(np.empty(shape, np.uint8))
    for piece in torch.split(filled.view(-1), BLOCK_BYTES):
        piece.copy_(block[: len(piece)])
    return filled
