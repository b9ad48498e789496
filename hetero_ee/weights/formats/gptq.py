"""GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel save it, versions 1 and 2.

A matrix `X.weight` (N, K) is stored as `X.qweight`, int32 (K / 8, N) for 4 bits, packed along K; `X.scales` (G, N);
`X.qzeros`, int32 (G, N / 8), packed along N, in version 1 one less than the zero point; and `X.g_idx`, int32 (K,), the
group of each column. With desc_act groups interleave.
"""

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.weights.formats.grouped_codes import (
    GroupedCodes,
    checked_groups,
    groups_in_order,
    packed_size,
    unpacked,
)
from hetero_ee.weights.formats.grouped_matrix import GroupedMatrix
from hetero_ee.weights.formats.saved_matrix import FLOATS

MARK = ".qweight"  # identifies a matrix in this format
SUFFIXES = (MARK, ".qzeros", ".scales", ".g_idx")


@dataclass(frozen=True, slots=True)
class GptqMatrix(GroupedMatrix):
    """A SavedMatrix in GPTQ; `module` is X."""

    def __post_init__(self) -> None:
        (n_rows, n_columns), bits = self.shape, self.bits
        self.tensors.require(self.module + MARK, ("I32",), (packed_size(n_columns, bits), n_rows))
        self.tensors.require(self.module + ".scales", FLOATS, (self.n_groups, n_rows))
        self.tensors.require(self.module + ".qzeros", ("I32",), (self.n_groups, packed_size(n_rows, bits)))
        if self.saved.reordered or self.module + ".g_idx" in self.tensors.names:
            self.tensors.require(self.module + ".g_idx", ("I32", "I64"), (n_columns,))

    @property
    def tensor_names(self) -> Set[str]:
        return {self.module + suffix for suffix in SUFFIXES}

    def codes(self) -> GroupedCodes:
        n_rows, n_columns = self.shape
        words = unpacked(self.tensors.read(self.module + MARK), self.bits)
        codes = words.permute(1, 0, 2).reshape(n_rows, -1)[:, :n_columns]
        scales = self.tensors.finite(self.module + ".scales").T.contiguous()
        return GroupedCodes(self.bits, codes, scales, self.groups(), self._zeros())

    def groups(self) -> Tensor:
        """Return the group of each column, int64 (K,)."""
        name, expected = self.module + ".g_idx", groups_in_order(self.shape[1], self.saved.group_size)
        if name not in self.tensors.names:
            return expected
        groups = checked_groups(self.tensors, name, self.n_groups)
        if not self.saved.reordered and not torch.equal(groups, expected):
            raise self.tensors.failure(
                name, "has groups in another order than config.json says (desc_act, static_groups)"
            )
        return groups

    def _zeros(self) -> Tensor | None:
        """Return zero points, int16 (N, G); None if the configuration says that all are the middle code."""
        name, n_rows = self.module + ".qzeros", self.shape[0]
        stored = unpacked(self.tensors.read(name), self.bits).flatten(1)[:, :n_rows].T
        zeros, middle = stored.to(torch.int16) + self.saved.zero_offset, 1 << (self.bits - 1)
        if self.saved.symmetric:
            if not (zeros == middle).all():
                found = int(zeros[zeros != middle][0])
                raise self.tensors.failure(name, f"has zero point {found}, and config.json says {middle} of all (sym)")
            return None
        if (zeros >> self.bits).any():
            raise self.tensors.failure(name, f"has zero point {1 << self.bits}, which overflowed when it was packed")
        return zeros.contiguous()
