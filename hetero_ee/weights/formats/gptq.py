"""GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel save it, versions 1 and 2.

A matrix `X.weight` (N, K) is stored as `X.qweight`, int32 (K / 8, N) for 4 bits, packed along K; `X.scales` (G, N);
`X.qzeros`, int32 (G, N / 8), packed along N, in version 1 one less than the zero point; and `X.g_idx`, int32 (K,), the
group of each column. With desc_act groups interleave.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.weights.formats.grouped_codes import GroupedCodes, packed_size, unpacked
from hetero_ee.weights.formats.grouped_matrix import GroupedMatrix
from hetero_ee.weights.formats.saved_matrix import FLOATS, Layout

MARK = ".qweight"  # identifies a matrix in this format
ZEROS, GROUPS = ".qzeros", ".g_idx"


@dataclass(frozen=True, slots=True)
class GptqMatrix(GroupedMatrix):
    """A matrix in GPTQ's format. Its tensors' names begin with `module`."""

    def layout(self) -> Layout:
        (n_rows, n_columns), bits = self.shape, self.bits
        has_order = self.saved.reordered or self.has(GROUPS)
        return {
            MARK: (("I32",), (packed_size(n_columns, bits), n_rows)),
            ".scales": (FLOATS, (self.n_groups, n_rows)),
            ZEROS: (("I32",), (self.n_groups, packed_size(n_rows, bits))),
            **({GROUPS: (("I32", "I64"), (n_columns,))} if has_order else {}),
        }

    def codes(self) -> GroupedCodes:
        n_columns = self.shape[1]
        codes = unpacked(self.read(MARK).T, self.bits).flatten(1)[:, :n_columns]
        scales = self.finite(".scales").T.contiguous()
        return GroupedCodes(self.bits, codes, scales, self.groups(), self._zeros())

    def groups(self) -> Tensor:
        """Return the group of each column, int64 (K,)."""
        expected = GroupedMatrix.groups(self)
        if not self.has(GROUPS):
            return expected
        groups = self.checked_groups(GROUPS)
        if not self.saved.reordered and not torch.equal(groups, expected):
            raise self.failure(GROUPS, "has groups in another order than config.json says (desc_act, static_groups)")
        return groups

    def _zeros(self) -> Tensor | None:
        """Return zero points, int16 (N, G); None if config.json says that all are the middle code."""
        stored = unpacked(self.read(ZEROS), self.bits).flatten(1)[:, : self.shape[0]].T
        zeros, middle = stored.to(torch.int16) + self.saved.zero_offset, 1 << (self.bits - 1)
        if self.saved.symmetric:
            if not (zeros == middle).all():
                found = int(zeros[zeros != middle][0])
                raise self.failure(ZEROS, f"has zero point {found}, and config.json says {middle} of all (sym)")
            return None
        if (zeros >> self.bits).any():
            raise self.failure(ZEROS, f"has zero point {1 << self.bits}, which overflowed when it was packed")
        return zeros.contiguous()
