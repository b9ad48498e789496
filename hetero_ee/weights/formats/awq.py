"""AWQ (arXiv 2306.00978) as AutoAWQ saves it for its GEMM kernel.

A matrix `X.weight` (N, K) is stored as `X.qweight`, int32 (K, N / 8), `X.qzeros`, int32 (G, N / 8), and `X.scales`
(G, N). The first two are packed along N: a word's nibbles, lowest first, are columns 0, 2, 4, 6, 1, 3, 5, 7.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.weights.formats.grouped_codes import GroupedCodes, packed_size
from hetero_ee.weights.formats.grouped_matrix import GroupedMatrix
from hetero_ee.weights.formats.saved_matrix import FLOATS, Layout

NIBBLE_OF = [0, 4, 1, 5, 2, 6, 3, 7]  # position in a word of each of its eight numbers
MARK = ".qweight"


@dataclass(frozen=True, slots=True)
class AwqMatrix(GroupedMatrix):
    """A matrix in AWQ's format. Its tensors' names begin with `module`."""

    def layout(self) -> Layout:
        (n_rows, n_columns), groups = self.shape, self.n_groups
        n_words = packed_size(n_rows, self.bits)
        numbers = {MARK: (("I32",), (n_columns, n_words)), ".qzeros": (("I32",), (groups, n_words))}
        return numbers | {".scales": (FLOATS, (groups, n_rows))}

    def codes(self) -> GroupedCodes:
        codes, zeros = self._numbers(MARK), self._numbers(".qzeros").to(torch.int16)
        scales = self.finite(".scales").T.contiguous()
        return GroupedCodes(self.bits, codes, scales, self.groups(), zeros)

    def _numbers(self, suffix: str) -> Tensor:
        """Unpack a tensor to uint8 (N, columns), or to uint8 (N, groups) for zero points."""
        words = self.read(suffix).T.contiguous()
        numbers = torch.stack([(words >> 4 * nibble & 15).to(torch.uint8) for nibble in NIBBLE_OF], dim=1)
        return numbers.flatten(0, 1)[: self.shape[0]]
