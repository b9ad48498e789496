"""Where keys and values of many sequences lie on the GPU: pages of 64 positions in one pool, found by a table.

codes (n_pages, n_layers, 2, n_kv_heads, 64, head_dim): keys, then values, fp32, fp16 or int8; int8 with fp32 scales
(n_pages, n_layers, 2, n_kv_heads, 64). table (n_slots, pages_a_slot) int32: position p of the sequence in slot s lies
in page table[s, p // 64] at p % 64. Kernels read slots, positions and the table from device memory: a recorded CUDA
graph stays right while contexts grow.
"""

from dataclasses import dataclass
from typing import Any

import torch

from hetero_ee_kernels.checks import check

PAGE_TOKENS = 64  # a block of the online softmax too, so that a block never straddles pages
PART_TOKENS = 256  # positions an attention program reads: 4096 of context are 16 programs a key head
FEW_ROWS = 16  # up to so many, each of a row's parts has an attention program of its own
KINDS = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """scales: with int8 only. Raises ValueError for other shapes, dtypes or layouts."""

    codes: Any
    scales: Any
    table: Any

    def __post_init__(self) -> None:
        n_pages, n_layers, _, n_kv_heads, _, head_dim = self.codes.shape
        check("codes", self.codes, (n_pages, n_layers, 2, n_kv_heads, PAGE_TOKENS, head_dim), *KINDS.values())
        check("table", self.table, (self.table.shape[0], self.table.shape[-1]), torch.int32)
        if (self.codes.dtype == torch.int8) != (self.scales is not None):
            raise ValueError(f"codes are {self.codes.dtype}; int8 has scales, the others have none.")
        if self.scales is not None:
            check("scales", self.scales, tuple(self.codes.shape[:5]))

    @property
    def n_layers(self) -> int:
        return int(self.codes.shape[1])

    @property
    def n_kv_heads(self) -> int:
        return int(self.codes.shape[3])

    @property
    def head_dim(self) -> int:
        return int(self.codes.shape[5])

    @property
    def pages_a_slot(self) -> int:
        return int(self.table.shape[1])

    @property
    def n_parts(self) -> int:
        """Attention's parts of the longest sequence that the table can hold."""
        return -(-self.pages_a_slot * PAGE_TOKENS // PART_TOKENS)


def new_pages(shape: tuple[int, int, int], kind: str, n_pages: int, table_shape: tuple[int, int], device: Any) -> Pages:
    """An empty pool. shape: (n_layers, n_kv_heads, head_dim); kind: of KINDS; table_shape: (n_slots, pages_a_slot)."""
    n_layers, n_kv_heads, head_dim = shape
    codes_shape = (n_pages, n_layers, 2, n_kv_heads, PAGE_TOKENS, head_dim)
    codes = torch.zeros(codes_shape, dtype=KINDS[kind], device=device)
    scales = torch.zeros(codes_shape[:5], device=device) if kind == "int8" else None
    return Pages(codes, scales, torch.zeros(table_shape, dtype=torch.int32, device=device))


def attention_workspace(pages: Pages, max_rows: int, n_heads: int) -> Any:
    """What attention of up to max_rows rows needs: fp32, for the parts of FEW_ROWS at most. One serves every layer, as
    layers follow each other."""
    n_entries = min(max_rows, FEW_ROWS) * n_heads * pages.n_parts
    return torch.empty(workspace_size(n_entries, pages.head_dim), device=pages.codes.device)


def workspace_size(n_entries: int, head_dim: int) -> int:
    """Of each entry (token, head, part) a maximum and a sum, then head_dim sums; the first rounded up to 16 bytes."""
    return -(-2 * n_entries // 4) * 4 + n_entries * head_dim


def check_rows(x: Any, pages: Pages, slots: Any, positions: Any, layer: int) -> None:
    """Raises ValueError unless x is fp32 (m, features), slots and positions int32 (m,), and the layer is there."""
    m = x.shape[0]
    check("x", x, (m, x.shape[-1]))
    check("slots", slots, (m,), torch.int32)
    check("positions", positions, (m,), torch.int32)
    if not 0 <= layer < pages.n_layers:
        raise ValueError(f"layer {layer} of {pages.n_layers}.")
