"""The paged KV cache on the GPU: keys and values of many sequences in one pool of 64-position pages, found by a table.

codes (n_pages, n_layers, n_stored, n_kv_heads, 64, head_dim): keys, then values, fp32, fp16 or int8. n_stored is 2, or
1 if values are features of the keys. int8 has fp32 scales (n_pages, n_layers, n_stored, n_kv_heads, 64).
table (n_slots, pages_per_slot) int32: line p of the sequence in slot s is in
page table[s, p // 64] at p % 64, and a position's line is its own number. Only a row of a draft tree has a path, int32
(1 + n,): its branch, then the lines of the positions from the branch on, up to its own. Kernels read slots, positions,
paths and the table from device memory, so a recorded CUDA graph stays valid while contexts grow.
"""

from dataclasses import dataclass
from typing import Any

import torch

from hetero_ee_kernels.checks import check

PAGE_TOKENS = 64  # also a block of the online softmax, so that a block never straddles pages
PART_TOKENS = 256  # positions per attention program: a 4,096-token context has 16 programs per key head
FEW_ROWS = 16  # up to this many rows, each part of a row has its own attention program
KINDS = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """The tensors of a paged KV cache; scales only for int8. Raises: ValueError: if a shape or dtype is wrong."""

    codes: Any
    scales: Any
    table: Any

    def __post_init__(self) -> None:
        n_pages, n_layers, n_stored, n_kv_heads, _, head_dim = self.codes.shape
        shape = n_pages, n_layers, 1 if n_stored == 1 else 2, n_kv_heads, PAGE_TOKENS, head_dim
        check("codes", self.codes, shape, *KINDS.values())
        check("table", self.table, (self.table.shape[0], self.table.shape[-1]), torch.int32)
        if (self.codes.dtype == torch.int8) != (self.scales is not None):
            raise ValueError(f"KV pages of {self.codes.dtype} are inconsistent: int8 needs scales, no other has them.")
        if self.scales is not None:
            check("scales", self.scales, tuple(self.codes.shape[:5]))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the same pages for new_pages()."""
        return self.n_layers, self.n_kv_heads, self.head_dim, self.n_stored

    @property
    def n_layers(self) -> int:
        return int(self.codes.shape[1])

    @property
    def n_stored(self) -> int:
        return int(self.codes.shape[2])

    @property
    def n_kv_heads(self) -> int:
        return int(self.codes.shape[3])

    @property
    def head_dim(self) -> int:
        return int(self.codes.shape[5])

    @property
    def pages_per_slot(self) -> int:
        return int(self.table.shape[1])

    @property
    def n_parts(self) -> int:
        """Number of parts into which attention divides the longest sequence that the table allows."""
        return -(-self.pages_per_slot * PAGE_TOKENS // PART_TOKENS)


def new_pages(shape: tuple[int, ...], kind: str, n_pages: int, table_shape: tuple[int, int], device: Any) -> Pages:
    """Allocate a pool of pages.

    Args:
        shape: (n_layers, n_kv_heads, head_dim), then n_stored unless it is 2.
        table_shape: (n_slots, pages_per_slot).
    """
    n_layers, n_kv_heads, head_dim, n_stored = (*shape, 2)[:4]
    codes_shape = (n_pages, n_layers, n_stored, n_kv_heads, PAGE_TOKENS, head_dim)
    codes = torch.zeros(codes_shape, dtype=KINDS[kind], device=device)
    scales = torch.zeros(codes_shape[:5], device=device) if kind == "int8" else None
    return Pages(codes, scales, torch.zeros(table_shape, dtype=torch.int32, device=device))


def attention_workspace(pages: Pages, max_rows: int, n_heads: int) -> Any:
    """Allocate the fp32 workspace of attention for up to max_rows rows, which all layers can share."""
    n_entries = min(max_rows, FEW_ROWS) * n_heads * pages.n_parts
    return torch.empty(workspace_size(n_entries, pages.head_dim), device=pages.codes.device)


def workspace_size(n_entries: int, head_dim: int) -> int:
    """Return the size in fp32 numbers: a maximum and a sum per (row, head, part), padded, then weighted sums."""
    return -(-2 * n_entries // 4) * 4 + n_entries * head_dim


def check_rows(x: Any, pages: Pages, slots: Any, positions: Any, layer: int, paths: Any = None) -> None:
    """Check x, fp32 (m, features), slots and positions, int32 (m,), paths and the layer, or raise ValueError."""
    m = x.shape[0]
    check("x", x, (m, x.shape[-1]))
    check("slots", slots, (m,), torch.int32)
    check("positions", positions, (m,), torch.int32)
    if paths is not None:
        check("paths", paths, (m, paths.shape[-1]), torch.int32)
    if not 0 <= layer < pages.n_layers:
        raise ValueError(f"Layer {layer} is outside the cache's {pages.n_layers} layers.")
