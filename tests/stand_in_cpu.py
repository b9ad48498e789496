"""The CPU's kernels with times of their own: they compute what they always do, and a clock says what that took."""

from collections.abc import Callable
from typing import Any

import pytest

from hetero_ee.layers.decoder import BoundBlock
from hetero_ee.ops import cpu as cpu_operations
from hetero_ee.ops import cpu_rows
from hetero_ee_cpu_ops.attention.attention import Attention
from hetero_ee_cpu_ops.attention.kv_table import POSITION
from hetero_ee_cpu_ops.attention.kv_write import KvWrite
from hetero_ee_cpu_ops.matmul import Matmul

BYTE_S, POSITION_S, WRITE_S, EMBED_S = 1e-9, 1e-7, 3e-6, 7e-6
PLACE_S, PLACES_S = 4e-6, 2e-6  # of the executor itself: once in a layer, once in a pass
SLOWER_S = 5e-9  # a product, for each position that the pass has kept: what it read is in no cache any more


class WorkClock:
    """Goes on when a kernel works, and by look_s at each look."""

    def __init__(self, patch: pytest.MonkeyPatch, look_s: float = 0.0) -> None:
        self.now_s, self.look_s, self.kept = 0.0, look_s, 0
        self._spend(patch, Matmul, "__call__", lambda self_, x, matrix: self.product_s(matrix.n_bytes, len(x)))
        self._spend(
            patch, Attention, "attend", lambda self_, x, places, layer, window: self._attention_s(places, window)
        )
        self._spend(patch, KvWrite, "write", lambda *arguments: WRITE_S)
        self._spend(patch, BoundBlock, "finish", lambda *arguments: PLACE_S / 2)  # a layer is two blocks
        self._spend(patch, cpu_rows, "kv_table", lambda *arguments: PLACES_S)
        for name in ("embed_int4", "embed_int8"):
            self._spend(patch, cpu_operations, name, lambda *arguments: EMBED_S)

    def __call__(self) -> float:
        self.now_s += self.look_s
        return self.now_s

    def product_s(self, n_bytes: int, m: int) -> float:
        """Of m rows at the present context."""
        return n_bytes * BYTE_S * m + SLOWER_S * self.kept

    def _attention_s(self, places: Any, window: int | None) -> float:
        self.kept = int(places[0, POSITION])  # the rows of one sequence follow each other
        seen = (int(position) + 1 for position in places[:, POSITION])
        return POSITION_S * sum(min(each, window or each) for each in seen)

    def _spend(self, patch: pytest.MonkeyPatch, owner: Any, name: str, seconds: Callable[..., float]) -> None:
        real = getattr(owner, name)

        def spending(*arguments: Any, **options: Any) -> Any:
            self.now_s += seconds(*arguments)
            return real(*arguments, **options)

        patch.setattr(owner, name, spending)
