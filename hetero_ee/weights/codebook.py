"""Search the scales and codes of groups of 32 weights, for a codebook of 16 entries.

A scale s and entries q minimize the sum of (w - s q)^2 over a group's weights w, without padding. For given entries the
best scale is sum(w q) / sum(q q) (least squares).
"""

from typing import Any

import torch
from torch import Tensor

from hetero_ee.weights import tiles as layout

SEARCH_SPAN = 0.16
COMPILED_WEIGHTS = 2**18  # smallest matrix for which kernels are compiled: torch needs 0.05 s for it


class Search:
    """Searches the scales of groups whose entries range from `lowest` to `highest`.

    Args:
        span: the farthest trial scale, relative to the plain one.
    """

    group_columns = layout.TILE_COLUMNS  # columns that share a scale

    def __init__(self, lowest: float, highest: float, span: float = SEARCH_SPAN) -> None:
        self.lowest, self.highest, self._span = lowest, highest, span

    def plain_scales(self, groups: Tensor) -> Tensor:
        """Return scales (n, g) that map the largest weight of each group (n, g, k) to the lowest entry."""
        largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
        return largest / self.lowest

    def scales(self, groups: Tensor, mask: Tensor, n_steps: int) -> Tensor:
        """Try scales for each of the groups (n, g, k), and return the least-squares scales (n, g) of the best codes.

        Args:
            mask: 1 for the matrix's columns, 0 for padding, where groups are 0. Other numbers weigh columns' errors.
            n_steps: trials on each side of the two scales that map the largest weight to the lowest or the highest
                entry.
        """
        plain = self.plain_scales(groups)
        mirrored = plain * (self.lowest / self.highest)
        best_gain = torch.zeros_like(plain)
        best_scale, weighted = plain, groups * mask
        for factor in _factors(n_steps, self._span):
            for anchor in (plain, mirrored):
                chosen = self._nearest(groups * safe_inverse(anchor * factor)[:, :, None])
                product = (weighted * chosen).sum(-1)
                norm = (chosen * chosen).mul_(mask).sum(-1).clamp_min_(1e-30)
                gain = product * product / norm  # reduction of the squared error
                better = gain > best_gain
                best_gain = torch.where(better, gain, best_gain)
                best_scale = torch.where(better, product / norm, best_scale)
        return best_scale

    def _nearest(self, targets: Tensor) -> Tensor:
        raise NotImplementedError


class Integers(Search):
    """Chooses scales and codes of the layouts "int5", "int6" and "int8", whose entries are integers."""

    def __init__(self, name: str) -> None:
        self._offset = layout.ENTRY_OFFSETS.get(name, 0)
        lowest, highest = (-self._offset, self._offset - 1) if self._offset else (-127, 127)
        super().__init__(lowest, highest, SEARCH_SPAN * 8 / -lowest)  # more bits leave less to gain
        self.group_columns = layout.TILE_COLUMNS * layout.TILE_ROWS // layout.SCALES_A_TILE[name]

    def codes(self, targets: Tensor) -> Tensor:
        """Return the codes of the entries nearest to the targets, as tiles.pack expects them."""
        return (self._nearest(targets) + self._offset).to(torch.uint8 if self._offset else torch.int8)

    def values(self, codes: Tensor) -> Tensor:
        """Return the entries of codes."""
        return codes.float() - self._offset

    def _nearest(self, targets: Tensor) -> Tensor:
        return targets.round().clamp_(self.lowest, self.highest)


class Codebook(Search):
    """Chooses scales and codes with torch's operations, the reference for the compiled kernels.

    Entries are integers, so the midpoints between them are multiples of 0.5. A table with cells of width 0.5 therefore
    finds the nearest entry exactly. The lookup is fifteen times as fast as torch.bucketize (1.3 against 20 ns per
    weight, one Zen 5 core, 2026-11-21).
    """

    def __init__(self, entries: Tensor) -> None:
        super().__init__(float(entries[0]), float(entries[-1]))
        self._entries = entries
        cells = (torch.arange(-256, 256) + 0.5) / 2
        self._codes = torch.bucketize(cells, (entries[1:] + entries[:-1]) / 2).to(torch.uint8)
        self._values = entries[self._codes.int()]

    def sums(self, groups: Tensor, mask: Tensor, n_steps: int) -> tuple[Tensor, Tensor]:
        """Search scales, and return for each code the sum of weight x scale and the sum of squared scales."""
        scales = self.scales(groups, mask, n_steps)[:, :, None]
        codes = self.codes(groups * safe_inverse(scales)).long().flatten()
        numerator = torch.zeros(16).scatter_add_(0, codes, (groups * mask * scales).flatten())
        squares = (mask * scales * scales).expand_as(groups).flatten()
        return numerator, torch.zeros(16).scatter_add_(0, codes, squares)

    def tiles(self, groups: Tensor, inverse: Tensor) -> Tensor:
        """Quantize groups (n, g, 32) with the inverse scales (n, g) and pack the codes into tiles."""
        return layout.pack_int4(self.codes(groups * inverse[:, :, None]).flatten(1))

    def codes(self, targets: Tensor) -> Tensor:
        """Return the index of the entry nearest to each target, uint8; the upper one wins a tie."""
        return self._codes.index_select(0, self._cells(targets)).view_as(targets)

    def values(self, codes: Tensor) -> Tensor:
        """Return the entries of codes."""
        return self._entries.index_select(0, codes.flatten().int()).view_as(codes)

    def _nearest(self, targets: Tensor) -> Tensor:
        return self._values.index_select(0, self._cells(targets)).view_as(targets)

    def _cells(self, targets: Tensor) -> Tensor:
        return (targets * 2).floor_().clamp_(-256, 255).add_(256).nan_to_num_(0).int().flatten()


class CompiledCodebook(Codebook):
    """Compiled version of `Codebook` with bit-equal results. Groups must be without padding, and masks all 1."""

    def __init__(self, entries: Tensor) -> None:
        from hetero_ee_cpu_ops import quantize_weights

        super().__init__(entries)
        self._kernels: Any = quantize_weights
        first_cells = (self._codes <= torch.arange(-1, 15)[:, None]).sum(-1)
        self._table = torch.cat([(first_cells - 256) / 2, entries, torch.arange(16)]).float().numpy()

    def scales(self, groups: Tensor, mask: Tensor, n_steps: int) -> Tensor:
        found = self._kernels.search_scales(_flat(groups), self._table, _factors(n_steps).numpy())
        return torch.from_numpy(found)[: groups.numel() // layout.TILE_COLUMNS].view(groups.shape[:2])

    def sums(self, groups: Tensor, mask: Tensor, n_steps: int) -> tuple[Tensor, Tensor]:
        found = torch.from_numpy(self._kernels.fit_sums(_flat(groups), self._table, _factors(n_steps).numpy()))
        return found[:16], found[16:]

    def tiles(self, groups: Tensor, inverse: Tensor) -> Tensor:
        tiles = self._kernels.encode_int4(groups.numpy(), inverse.contiguous().numpy(), self._table)
        return torch.from_numpy(tiles)


def codebook_type(weight: Tensor) -> type[Codebook]:
    """Return the faster class for a matrix. Compiling the kernels takes a second, too long for a small matrix."""
    is_whole = weight.shape[1] % layout.TILE_COLUMNS == 0
    return CompiledCodebook if is_whole and weight.numel() >= COMPILED_WEIGHTS else Codebook


def safe_inverse(scales: Tensor) -> Tensor:
    """Return 1 / scale, and 0 for a group of zeros."""
    is_0 = scales == 0
    return torch.where(is_0, torch.zeros_like(scales), 1 / torch.where(is_0, torch.ones_like(scales), scales))


def _factors(n_steps: int, span: float = SEARCH_SPAN) -> Tensor:
    """Return the factors, fp32, that are tried on a plain scale."""
    return torch.tensor([1 + span * step / n_steps for step in range(-n_steps, n_steps + 1)])


def _flat(groups: Tensor) -> Any:
    """Reshape groups (n, g, 32) to (16 m, 32), padded with zeros."""
    flat = groups.reshape(-1, layout.TILE_COLUMNS)
    return torch.nn.functional.pad(flat, (0, 0, 0, -len(flat) % layout.TILE_ROWS)).numpy()
