"""The store of docs/FORMAT.md: fixed tensors, one of each layout, made without a quantizer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hetero_ee.weights import tiles as layout
from hetero_ee.weights.rows import in_rows
from hetero_ee.weights.store.filesystem import FileSystem
from hetero_ee.weights.store.writer import StoreWriter
from hetero_ee.weights.weight import LINEAR_CODEBOOK, TileWeight

CODEBOOK = (-127, -96, -71, -52, -38, -26, -15, -5, 4, 14, 25, 37, 51, 70, 95, 126)
SOURCE: dict[str, Any] = {
    "model": "tiny",
    "architecture": "LlamaForCausalLM",
    "files": [{"name": "model.safetensors", "n_bytes": 12345, "mtime_ns": 1700000000123456789}],
}
CONFIG = b'{"model_type": "llama"}'
MATRIX, VOCABULARY, VECTOR = 0, 1, 2  # places of its entries


def grid(n_rows: int, n_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = torch.meshgrid(torch.arange(n_rows), torch.arange(n_columns), indexing="ij")
    return rows, columns


def write_store(folder: Path) -> Path:
    return _write(folder, with_zeros=False)


def write_zeros_store(folder: Path) -> Path:
    """The same, its int4 matrix of linear codes with zero points."""
    return _write(folder, with_zeros=True)


def write_rows_store(folder: Path) -> Path:
    """The same, its FFN, which is that matrix, in rows."""
    return _write(folder, with_zeros=False, by_rows=True)


def _write(folder: Path, *, with_zeros: bool, by_rows: bool = False) -> Path:
    n, k = grid(48, 96)
    scales = layout.pack_scales((16384 + 16 * n + 1024 * k)[:, :3].half())
    codes, values = ((7 * n + k + k // 3) % 16).to(torch.uint8), ((5 * n + 7 * k) % 255 - 127).to(torch.int8)
    up = TileWeight(layout.pack_int4(codes), scales, -21, CODEBOOK, 40, 70)
    if with_zeros:
        packed = layout.pack_scales(layout.unpack_scales(scales), ((n % 16 - k) / 4)[:, :3].half())
        up = TileWeight(up.tiles, packed, -21, LINEAR_CODEBOOK, 40, 70)
    (folder / "config.json").write_bytes(CONFIG)
    with StoreWriter(folder / "store", FileSystem(), {}) as writer:
        writer.add_matrix("layers.0.ffn.up", in_rows(replace(up, codebook=LINEAR_CODEBOOK)) if by_rows else up)
        writer.add_matrix("embedding.tokens", TileWeight(layout.pack_int8(values), scales, -14, None, 48, 96))
        writer.add_values("final_norm.norm", torch.arange(70) / 64)
        writer.copy_files(folder)
        return writer.finish("codebook", "int8", SOURCE)
