"""The integer formats of compressed-tensors (vLLM's llm-compressor), MXFP4, and gpt-oss's MXFP4.

pack-quantized stores a matrix `X.weight` (N, K) as `X.weight_packed`, int32 (N, K / 8) for 4 bits, values + 8, lowest
bits first; `X.weight_scale` (N, G); `X.weight_shape`; with zero points `X.weight_zero_point`, int32 (N / 8, G), packed
along N, + 8, too; and for interleaved groups `X.weight_g_idx`. int-quantized has `X.weight` and zero points (N, G) in
int8. mxfp4-pack-quantized has `X.weight_packed`, uint8 (N, K / 2), and `X.weight_scale`, a byte e for 2^(e - 127).
gpt-oss has the same bytes of all experts together: `X_blocks` (experts, N, K / 32, 16) and `X_scales`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hetero_ee.models.hf_names import BLOCKS
from hetero_ee.models.saved_format import GROUP_COLUMNS
from hetero_ee.weights.blocks import Blocks, RowBlocks
from hetero_ee.weights.formats.grouped_codes import GroupedCodes, packed_size, unpacked
from hetero_ee.weights.formats.grouped_matrix import GroupedMatrix
from hetero_ee.weights.formats.saved_matrix import FLOATS, Layout, StoredMatrix
from hetero_ee.weights.gguf_blocks import mxfp4_blocks

PACKED, PLAIN = ".weight_packed", ".weight"
SCALE, ZERO_POINT, GROUPS, SHAPE = ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape"
NOT_A_NUMBER = 255  # as an exponent of MXFP4
SCALE_TYPES = ("U8", "F8_E8M0")  # of MXFP4


@dataclass(frozen=True, slots=True)
class CompressedMatrix(GroupedMatrix):
    """An integer matrix in compressed-tensors' format. Its tensors' names begin with `module`."""

    def layout(self) -> Layout:
        (n_rows, n_columns), bits, groups = self.shape, self.bits, self.n_groups
        one_for_all = ((1,), (), (1, 1)) if groups == 1 else ()
        found: dict[str, tuple[Any, ...]] = {PLAIN: (("I8",), self.shape)}
        zeros: tuple[Any, ...] = (("I8",), (n_rows, groups), *one_for_all)
        if self.is_packed:
            found = {PACKED: (("I32",), (n_rows, packed_size(n_columns, bits))), SHAPE: (("I64", "I32"), (2,))}
            zeros = (("I32",), (packed_size(n_rows, bits), groups))
        found[SCALE] = (FLOATS, (n_rows, groups), *one_for_all)
        if not self.saved.symmetric:
            found[ZERO_POINT] = zeros
        return found | ({GROUPS: (("I32", "I64"), (n_columns,))} if self.saved.reordered else {})

    @property
    def is_packed(self) -> bool:
        return self.has(PACKED)

    def codes(self) -> GroupedCodes:
        n_rows, n_columns = self.shape
        if self.is_packed:
            self._check_shape()
            codes = unpacked(self.read(PACKED), self.bits).flatten(1)[:, :n_columns]
        else:
            codes = self.read(PLAIN).view(torch.uint8) ^ 128
        scales = self.finite(SCALE).view(-1, self.n_groups).expand(n_rows, -1)
        return GroupedCodes(self.bits, codes, scales, self.groups(), self._zeros())

    def groups(self) -> Tensor:
        """Return the group of each column, int64 (K,)."""
        return self.checked_groups(GROUPS) if self.saved.reordered else GroupedMatrix.groups(self)

    def _zeros(self) -> Tensor | None:
        """Return zero points, int16 (N, G); None if all equal the code in the middle of the range."""
        if self.saved.symmetric:
            return None
        stored = self.read(ZERO_POINT)
        if not self.is_packed:
            return (stored.view(torch.uint8) ^ 128).view(-1, self.n_groups).expand(self.shape[0], -1).to(torch.int16)
        words = unpacked(stored, self.bits).permute(0, 2, 1)
        return words.reshape(-1, self.n_groups)[: self.shape[0]].to(torch.int16)

    def _check_shape(self) -> None:
        found = self.read(SHAPE).tolist()
        if found != list(self.shape):
            raise self.failure(SHAPE, f"is {found}, expected {list(self.shape)}")


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix(StoredMatrix):
    """A matrix in MXFP4. Its tensors' names begin with `module`."""

    packed: ClassVar[str] = PACKED
    scale: ClassVar[str] = SCALE

    def layout(self) -> Layout:
        n_rows, n_columns = self.shape
        if n_columns % GROUP_COLUMNS:
            raise self.failure(self.packed, f"has rows of {n_columns}, no multiple of {GROUP_COLUMNS}")
        return self.shapes(n_rows, n_columns // GROUP_COLUMNS)

    def shapes(self, n_rows: int, n_scales: int) -> Layout:
        """Return the layout of rows with n_scales groups of columns."""
        packed_columns = n_scales * GROUP_COLUMNS // 2
        return {PACKED: (("U8",), (n_rows, packed_columns)), SCALE: (SCALE_TYPES, (n_rows, n_scales))}

    def dequantize(self) -> Tensor:
        return self.blocks(in_8_bits=False).rows(slice(None)).dequantize()

    def blocks(self, *, in_8_bits: bool) -> RowBlocks:
        n_rows = self.shape[0]
        packed = self.read(self.packed).view(n_rows, -1)
        exponents = self.read(self.scale).view(torch.uint8).view(n_rows, -1)
        if (exponents == NOT_A_NUMBER).any():
            index = [int(i) for i in (exponents == NOT_A_NUMBER).nonzero()[0]]
            raise self.failure(self.scale, f"gives nan at {index}")

        def rows_of(rows: slice | Tensor) -> Blocks:
            bytes_ = packed[rows]
            return mxfp4_blocks(torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).flatten(1), exponents[rows])

        return RowBlocks(len(packed), rows_of)


@dataclass(frozen=True, slots=True)
class Mxfp4Experts(Mxfp4Matrix):
    """The matrices of all experts of a layer in MXFP4, stacked by row."""

    packed: ClassVar[str] = BLOCKS
    scale: ClassVar[str] = "_scales"
    n_experts: int = 1

    def shapes(self, n_rows: int, n_scales: int) -> Layout:
        shape = self.n_experts, n_rows // self.n_experts, n_scales
        return {self.packed: (("U8",), (*shape, GROUP_COLUMNS // 2)), self.scale: (SCALE_TYPES, shape)}
