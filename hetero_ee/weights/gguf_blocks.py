"""Read the weights of GGUF files: as blocks with the file's codes if tiles can hold them, otherwise as floats.

Blocks of 32 weights. The low nibbles of the 16 bytes of codes are elements 0 to 15, the high ones 16 to 31:
    Q4_0, IQ4_NL: fp16 d; 16 bytes. Q4_1: fp16 d; fp16 m; 16 bytes. A weight is d q + m.
    Q5_0: fp16 d; the 32 fifth bits; 16 bytes. Q5_1: as Q4_1, with the fifth bits before the bytes.
    Q8_0: fp16 d; 32 int8. MXFP4: a byte e for 2^(e - 127); 16 bytes.
Eight blocks together:
    IQ4_XS: fp16 d; 8 x 2 high bits of s; 8 x 4 low bits of s; 8 x 16 bytes. A block's scale is d (s - 32).
    Q4_K: fp16 d; fp16 e; 12 bytes with 6-bit s and m of each block; 4 x 32 bytes, whose low nibbles are one block and
        whose high ones the next. A weight is d s q - e m.
    Q5_K: as Q4_K, with 32 bytes of fifth bits before the codes: bit b of byte i is that of element i of block b.
    Q6_K: 128 bytes of low nibbles; 64 bytes of the two high bits; 16 int8 scales s of 16 weights each; fp16 d. Half of
        the low bytes and 32 high ones belong to four blocks: byte i of the high ones has, from bit 0 on, the bits of
        element i of each block; low byte i those of block 0 and, in its high nibble, 2; byte 32 + i those of 1 and 3.
        A weight is d s (q - 32).
Source: ggml-common.h.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hetero_ee.weights.blocks import Blocks
from hetero_ee.weights.quantizers import Workers
from hetero_ee.weights.weight import LINEAR_CODEBOOK

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
IQ4_NL_CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# FP4's values by code, doubled so that all are integers (arXiv 2310.10537); the second zero is a negative one.
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
MXFP4_CODEBOOK = (*sorted(set(MXFP4_VALUES)), 13)  # no code has the last entry
CHUNK_WEIGHTS = 2**18  # weights per chunk; a dequantized chunk fits the processor's cache


def floats(raw: Tensor, kind: str, workers: Workers = map) -> Tensor:
    """Convert raw rows, uint8 (N, bytes per row), to fp32 (N, K)."""
    if kind in FLOATS:
        return raw.view(FLOATS[kind]).float()
    values_of = (lambda rows: KEPT[kind](rows).dequantize()) if kind in KEPT else _by_package(kind)
    first = values_of(raw[:1])
    values, n_rows = torch.empty(len(raw), first.shape[1]), max(1, CHUNK_WEIGHTS // first.shape[1])

    def convert(start: int) -> None:
        values[start : start + n_rows] = values_of(raw[start : start + n_rows])

    list(workers(convert, range(0, len(raw), n_rows)))
    return values


def _by_package(kind: str) -> Callable[[Tensor], Tensor]:
    import gguf
    import gguf.quants

    number = gguf.GGMLQuantizationType[kind]

    def dequantized(rows: Tensor) -> Tensor:
        with np.errstate(all="ignore"):  # scales may overflow; callers check that values are finite
            return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), number))

    return dequantized


def _q4_0(raw: Tensor) -> Blocks:
    blocks = _blocks(raw, 18)
    return Blocks(_nibbles(blocks[..., 2:]), _halves(blocks), LINEAR_CODEBOOK)


def _iq4_nl(raw: Tensor) -> Blocks:
    blocks = _blocks(raw, 18)
    return Blocks(_nibbles(blocks[..., 2:]), _halves(blocks), IQ4_NL_CODEBOOK)


def _iq4_xs(raw: Tensor) -> Blocks:
    blocks = _blocks(raw, 136)
    place = torch.arange(8, dtype=torch.uint8)  # index of the block among its eight
    high = (blocks[..., 2:4].repeat_interleave(4, -1) >> place % 4 * 2) & 3
    low = (blocks[..., 4:8].repeat_interleave(2, -1) >> place % 2 * 4) & 15
    scales = _halves(blocks)[..., None] * ((high << 4 | low).float() - 32)
    codes = _nibbles(blocks[..., 8:].reshape(len(raw), -1, 16))
    return Blocks(codes, scales.flatten(1), IQ4_NL_CODEBOOK)


def mxfp4_blocks(nibbles: Tensor, exponents: Tensor) -> Blocks:
    """Return MXFP4 blocks from FP4 codes, uint8 (N, K), and exponents e, uint8 (N, K / 32), which mean 2^(e - 127)."""
    renamed = torch.tensor([MXFP4_CODEBOOK.index(value) for value in MXFP4_VALUES], dtype=torch.uint8)
    powers = torch.tensor([2.0 ** (e - 128) for e in range(256)], dtype=torch.float64)
    return Blocks(renamed[nibbles.int()], powers[exponents.int()].float(), MXFP4_CODEBOOK)


def _q4_1(raw: Tensor) -> Blocks:
    blocks = _blocks(raw, 20)
    return Blocks.with_minimums(_nibbles(blocks[..., 4:]), _halves(blocks), -_halves(blocks[..., 2:]))


def _q4_k(raw: Tensor) -> Blocks:
    blocks = _blocks(raw, 144)
    codes = _nibbles(blocks[..., 16:].reshape(len(raw), -1, 32))
    return Blocks.with_minimums(codes, *_k_scales(blocks))


def _q5_k(raw: Tensor) -> Blocks:
    blocks = _blocks(raw, 176)
    fifth = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    codes = _nibbles(blocks[..., 48:].reshape(len(raw), -1, 32)) | fifth.reshape(len(raw), -1) << 4
    return Blocks.with_minimums(codes, *_k_scales(blocks), n_bits=5)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minimums of Q4_K's or Q5_K's blocks, fp32 (N, K / 32)."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1).float() * _halves(blocks)[..., None]
    minimums = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1).float() * _halves(blocks[..., 2:])[..., None]
    return scales.flatten(1), minimums.flatten(1)


def _q6_k(raw: Tensor) -> Blocks:
    blocks = _blocks(raw, 210)
    low, high = blocks[..., :128].reshape(len(raw), -1, 64), blocks[..., 128:192].reshape(len(raw), -1, 1, 32)
    nibbles = torch.cat([low & 15, low >> 4], -1).view(len(raw), -1, 4, 32)
    codes = nibbles | (high >> 2 * torch.arange(4, dtype=torch.uint8)[:, None] & 3) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * _halves(blocks[..., 208:])[..., None]
    return Blocks(codes.view(len(raw), -1).to(torch.int8) - 32, scales.flatten(1), None)


def _mxfp4(raw: Tensor) -> Blocks:
    blocks = _blocks(raw, 17)
    return mxfp4_blocks(_nibbles(blocks[..., 1:]), blocks[..., 0])


def _q5_0(raw: Tensor) -> Blocks:
    blocks = _blocks(raw, 22)
    return Blocks(_five_bits(blocks[..., 2:]).to(torch.int8) - 16, _halves(blocks), None)


def _q5_1(raw: Tensor) -> Blocks:
    blocks = _blocks(raw, 24)
    return Blocks.with_minimums(_five_bits(blocks[..., 4:]), _halves(blocks), -_halves(blocks[..., 2:]), n_bits=5)


def _five_bits(packed: Tensor) -> Tensor:
    """Unpack 4 bytes of fifth bits, of which bit j of byte i is element 8 i + j's, and 16 bytes of nibbles: (N, K)."""
    fifth = (packed[..., :4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return _nibbles(packed[..., 4:]) | (fifth.reshape(len(packed), -1) << 4)


def _q8_0(raw: Tensor) -> Blocks:
    blocks = _blocks(raw, 34)
    return Blocks(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _halves(blocks), None)


KEPT: dict[str, Callable[[Tensor], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}
# Types whose scales or zero points are rounded to fp16.
ROUNDED = frozenset({"Q4_1", "Q4_K", "Q5_1", "Q5_K", "Q6_K", "IQ4_XS"})


def _blocks(raw: Tensor, n_bytes: int) -> Tensor:
    """Split raw rows into blocks, uint8 (N, blocks per row, n_bytes)."""
    return raw.view(len(raw), -1, n_bytes)


def _halves(blocks: Tensor) -> Tensor:
    """Read the fp16 number at the beginning of each block, as fp32 (N, blocks per row)."""
    return blocks[..., :2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack 16 bytes per block to 32 codes, or 32 bytes per two blocks to 64: uint8 (N, K)."""
    return torch.cat([packed & 15, packed >> 4], dim=-1).flatten(1)
