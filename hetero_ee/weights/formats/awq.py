"""AWQ (arXiv 2306.00978) as AutoAWQ saves it for its GEMM kernel.

Of `X.weight` (N, K) there are `X.qweight`, int32 (K, N / 8), `X.qzeros`, int32 (G, N / 8), and `X.scales` (G, N). Both
packed along N: the nibbles of a word, the lowest first, are those of columns 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.models.saved_format import SavedFormat
from hetero_ee.weights.blocks import Blocks
from hetero_ee.weights.formats.grouped_codes import GroupedCodes, groups_in_order, n_groups, packed_size, unpacked
from hetero_ee.weights.formats.saved_matrix import FLOATS, RawTensors

BITS = 4
NIBBLE_OF = [0, 4, 1, 5, 2, 6, 3, 7]  # in a word, of each of its eight numbers
MARK = ".qweight"
SUFFIXES = (MARK, ".qzeros", ".scales")


@dataclass(frozen=True, slots=True)
class AwqMatrix:
    """A SavedMatrix; `module` is X."""

    module: str
    shape: tuple[int, int]
    saved: SavedFormat
    tensors: RawTensors

    def __post_init__(self) -> None:
        n_rows, n_columns = self.shape
        n_down, n_words = n_groups(n_columns, self.saved.group_size), packed_size(n_rows, BITS)
        self.tensors.require(self.module + MARK, ("I32",), (n_columns, n_words))
        self.tensors.require(self.module + ".qzeros", ("I32",), (n_down, n_words))
        self.tensors.require(self.module + ".scales", FLOATS, (n_down, n_rows))

    @property
    def tensor_names(self) -> Set[str]:
        return {self.module + suffix for suffix in SUFFIXES}

    def dequantize(self) -> Tensor:
        return self._codes().dequantize()

    def blocks(self, *, in_8_bits: bool) -> Blocks | None:
        return self._codes().blocks(in_8_bits=in_8_bits)

    def _codes(self) -> GroupedCodes:
        codes, zeros = self._numbers(MARK), self._numbers(".qzeros").to(torch.int16)
        scales = self.tensors.finite(self.module + ".scales").T.contiguous()
        return GroupedCodes(BITS, codes, scales, groups_in_order(self.shape[1], self.saved.group_size), zeros)

    def _numbers(self, suffix: str) -> Tensor:
        """uint8 (N, columns or groups)."""
        words = unpacked(self.tensors.read(self.module + suffix), BITS)
        return words[..., NIBBLE_OF].flatten(1)[:, : self.shape[0]].T.contiguous()
