"""Counts instructions of compiled kernels at a 7B model's row lengths, for the last table of docs/gpu_kernels.md."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee_kernels import activate, attention, draft, gated_delta, matmul, norm, sparse_ffn
from hetero_ee_kernels.delta_state import DeltaRows, DeltaShape, DeltaWeights, new_delta_state
from hetero_ee_kernels.pages import new_pages
from hetero_ee_kernels.row_matrix import RowMatrix
from tests.gpu.counts.sass import Sass, assembled
from tests.gpu.ptx.launcher import Launcher
from tests.gpu.ptx.memory import SECTOR_BYTES
from tests.gpu_support import int32, random
from tests.gpu_tiles import activations, random_matrix

ARCHITECTURE = 86
N_COLUMNS, N_ROWS, N_NEURONS, N_TOKENS, N_LOGITS = 4096, 128, 512, 1024, 32000
CARDS = {"RTX 3060": (28, 1.78, 360.0), "RTX 4060": (24, 2.46, 272.0), "RTX 4090": (128, 2.52, 1008.0)}
"""Multiprocessors, GHz, GB/s."""
MIN_SHARE = 0.2  # a kernel has a row if it executes at least this share of a workload's instructions


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the table: the counts of one kernel in one workload."""

    workload: str
    kernel: str
    instructions_per_byte: float  # thread instructions per byte of global memory touched
    asked_per_touched: float  # sectors requested by warps per different sector touched
    sass: Sass

    @property
    def clocks_per_kib(self) -> float:
        """Clocks that the tightest pipe of a multiprocessor needs per KiB touched."""
        return 1024 * self.instructions_per_byte * self.sass.clocks_per_ptx

    def share(self, card: str) -> float:
        """Return the time that the tightest pipe needs, as a share of the time to read the bytes from DRAM."""
        n_units, clock_ghz, gb_per_s = CARDS[card]
        return self.clocks_per_kib / 1024 / n_units / clock_ghz * gb_per_s


def workloads() -> dict[str, Callable[[], Any]]:
    """Return functions that launch a workload, by its name. Rows of weights are few, but as long as in a 7B model."""
    found: dict[str, Callable[[], Any]] = {}
    for kind, m in (("linear", 1), ("codebook", 1), ("int8", 1), ("zeros", 1), ("linear", 8), ("linear", 32)):
        found[f"{kind} weights, m = {m}"] = lambda kind=kind, m=m: matmul.matmul(
            activations(1, m, N_COLUMNS), random_matrix(kind, (N_ROWS, N_COLUMNS))
        )
    for kind, group, m in (("fp16", 1, 1), ("fp16", 4, 1), ("fp16", 4, 4), ("fp16", 4, 16), ("int8", 4, 1)):
        found[f"{kind} cache, {group} heads per key head, m = {m}"] = lambda a=(kind, group, m): _attend(*a)
    for m in (1, 4):
        found[f"fp16 cache, 4 heads per key head, m = {m}, no tensor cores"] = lambda m=m: _attend_by_lanes(m)
    found["10 % of the neurons"] = _sparse_ffn
    found["gated delta rule"] = _gated_delta
    found["norm"] = lambda: norm.rms_norm(random(1, 4, N_COLUMNS), None, 1e-5, delta=random(3, 4, N_COLUMNS))
    found["silu"] = lambda: activate.activate(random(1, 1, 2 * 11008), "silu", gated=True)
    found["greedy draft"] = lambda: draft.draft(random(1, 1, N_LOGITS), int32(0, 0, 0, 0, 0)[None])
    one = int(np.float32(1).view(np.int32))
    found["draft with noise"] = lambda: draft.draft(random(1, 1, N_LOGITS), int32(7, 0, 1, 5, one)[None])
    return found


def _attend(kind: str, group: int, m: int) -> None:
    n_kv_heads, head_dim, n_pages = 2, 128, N_TOKENS // 64
    pages = new_pages((1, n_kv_heads, head_dim), kind, n_pages, (1, n_pages), "cpu")
    pages.table.copy_(torch.arange(n_pages)[None])
    pages.codes.fill_(1)
    if pages.scales is not None:
        pages.scales.fill_(0.01)
    at = torch.arange(N_TOKENS - m, N_TOKENS, dtype=torch.int32)
    queries = random(1, m, n_kv_heads * group * head_dim)
    attention.attention(queries, pages, torch.zeros_like(at), at, 0, None, torch.empty_like(queries))


def _attend_by_lanes(m: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_has_products", lambda codes: False)
        _attend("fp16", 4, m)


def _sparse_ffn() -> None:
    codes = torch.randint(0, 256, (N_NEURONS, N_COLUMNS // 2), dtype=torch.uint8)
    rows = RowMatrix(codes, torch.rand(N_NEURONS, N_COLUMNS // 32).half(), -10, tuple(range(-8, 8)), N_COLUMNS)
    active = random(1, 1, N_NEURONS) * (torch.arange(N_NEURONS) % 10 == 0)
    sparse_ffn.sparse_ffn(random(2, 1, N_COLUMNS), active, rows, rows)


def _gated_delta() -> None:
    """One token of one of Qwen3.6-27B's sequences, with a twelfth of the heads and a log of 12 rows."""
    shape = DeltaShape(n_key_heads=1, n_value_heads=4, key_dim=128, value_dim=128, n_taps=4)
    state = new_delta_state(shape, 1, 1, "cpu")
    state.bases[:] = 24
    vectors = [torch.rand(n) for n in (shape.n_value_heads, shape.n_value_heads, shape.value_dim)]
    weights = DeltaWeights(random(1, shape.n_channels, shape.n_taps), *vectors, 1e-6)
    rows = DeltaRows(int32(0), int32(36), int32(-1))
    x, out = random(2, 1, shape.n_channels + shape.n_outputs), torch.empty(1, shape.n_outputs)
    gated_delta.gated_delta(x, random(3, 1, 2 * shape.n_value_heads), weights, state, rows, 0, out)


def counted(name: str, launcher: Launcher) -> list[Row]:
    """Execute a workload, and return a row for each kernel with at least MIN_SHARE of its instructions."""
    launcher.launches.clear()
    with launcher.installed():
        workloads()[name]()
    most, rows = max(launch.counts.n_instructions for launch in launcher.launches), []
    for launch in launcher.launches:
        if launch.counts.n_instructions >= MIN_SHARE * most:
            counts = launch.counts
            n_bytes = SECTOR_BYTES * counts.n_touched_sectors
            per_byte = 32 * launch.counts.n_instructions / n_bytes
            asked = counts.n_sectors / counts.n_touched_sectors
            sass = assembled(launch.program.text, launcher.architecture)
            rows.append(Row(name, launch.program.kernel.name, per_byte, asked, sass))
    return rows
