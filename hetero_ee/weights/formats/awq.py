"""AWQ (arXiv 2306.00978) as AutoAWQ saves it for its GEMM kernel.

A matrix `X.weight` (N, K) is stored as `X.qweight`, int32 (K, N / 8), `X.qzeros`, int32 (G, N / 8), and `X.scales`
(G, N). The first two are packed along N: a word's nibbles, lowest first, are columns 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.weights.formats.grouped_codes import GroupedCodes, packed_size, unpacked
from hetero_ee.weights.formats.grouped_matrix import GroupedMatrix
from hetero_ee.weights.formats.saved_matrix import FLOATS

NIBBLE_OF = [0, 4, 1, 5, 2, 6, 3, 7]  # position in a word of each of its eight numbers
MARK = ".qweight"
SUFFIXES = (MARK, ".qzeros", ".scales")


@dataclass(frozen=True, slots=True)
class AwqMatrix(GroupedMatrix):
    """A SavedMatrix in AWQ; `module` is X."""

    def __post_init__(self) -> None:
        n_rows, n_columns = self.shape
        n_words = packed_size(n_rows, self.bits)
        self.tensors.require(self.module + MARK, ("I32",), (n_columns, n_words))
        self.tensors.require(self.module + ".qzeros", ("I32",), (self.n_groups, n_words))
        self.tensors.require(self.module + ".scales", FLOATS, (self.n_groups, n_rows))

    @property
    def tensor_names(self) -> Set[str]:
        return {self.module + suffix for suffix in SUFFIXES}

    def codes(self) -> GroupedCodes:
        codes, zeros = self._numbers(MARK), self._numbers(".qzeros").to(torch.int16)
        scales = self.tensors.finite(self.module + ".scales").T.contiguous()
        return GroupedCodes(self.bits, codes, scales, self.groups(), zeros)

    def _numbers(self, suffix: str) -> Tensor:
        """Return numbers, uint8 (N, columns or groups)."""
        words = unpacked(self.tensors.read(self.module + suffix), self.bits)
        return words[..., NIBBLE_OF].flatten(1)[:, : self.shape[0]].T.contiguous()
