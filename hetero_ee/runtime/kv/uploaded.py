"""Keys and values uploaded to the GPU for one attention, as they are stored on the CPU, and copied back so."""

from typing import Any

import torch
from torch import Tensor

from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.kv.cpu import CpuKvCache
from hetero_ee.runtime.kv.gpu import GpuKvCache
from hetero_ee_kernels.pages import PAGE_TOKENS

VISITOR = 0  # the sequence that is visiting


class VisitingCache(GpuKvCache):
    """One layer of one sequence, whichever is visiting. The host waits for every copy."""

    def __init__(self, spec: ModelSpec, max_tokens: int, kind: str, device: Any) -> None:
        super().__init__((1, spec.n_kv_heads, spec.head_dim), max_tokens, device, n_slots=1, kind=kind)

    def index(self, layer: int) -> int:
        """There is one layer."""
        return 0

    def bring(self, owner: CpuKvCache, layer: int, sequence: int, first: int, n_known: int, n_rows: int) -> Batch:
        """The owner's positions first..n_known-1 of the layer, and room for n_rows more: these, as a batch here."""
        self.close(VISITOR)
        self.open(VISITOR)
        self.admit(Batch.of_sequence(VISITOR, 0, [0] * (n_known + n_rows)))
        if first < n_known:
            for ours, theirs in zip(self._parts(), owner.stored(layer, sequence, first, n_known), strict=True):
                at = self._pages_and_lines(first, n_known)
                ours[at] = theirs.transpose(0, 1).to(ours.device)
        return Batch.of_sequence(VISITOR, n_known, [0] * n_rows)

    def take_back(self, owner: CpuKvCache, layer: int, sequence: int, first: int, end: int) -> None:
        """Positions first..end-1, written since, into the owner's layer."""
        for ours, theirs in zip(self._parts(), owner.stored(layer, sequence, first, end), strict=True):
            theirs.copy_(ours[self._pages_and_lines(first, end)].transpose(0, 1))

    def _parts(self) -> list[Tensor]:
        """Keys, values, and int8's scales, in CpuKvCache's order: (n_pages, 64, n_kv_heads[, head_dim])."""
        codes, scales = self.pages.codes[:, 0].transpose(2, 3), self.pages.scales
        parts = [codes[:, 0], codes[:, 1]]
        return parts if scales is None else [*parts, *scales[:, 0].transpose(2, 3).unbind(1)]

    def _pages_and_lines(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Page and line of each position."""
        positions = torch.arange(first, end, device=self.pages.codes.device)
        table = self.pages.table[self._sequences[VISITOR].slot]
        return table[positions // PAGE_TOKENS].long(), positions % PAGE_TOKENS
