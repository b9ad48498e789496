"""The FFNs of a mixture's chosen experts and their weighted sums, in one call of compiled code.

    sums += weight_e down_e(act(gate_e x) * up_e x), one chosen expert e after the other

Steps are those of expert_pairs.py, grouped_matmul.py and activate.py. Python between them would cost one token 7 % of
its time at Qwen3.6-35B-A3B's shape, since the weights that stream through a core's caches push Python's data out.
"""

from typing import Any

import numpy as np
from numba import types

from hetero_ee_cpu_ops.activate import CHUNK, CHUNK_FUNCTION, INPUT, OUT, ROW_VALUES, SHARED_FROM, chunk_arguments
from hetero_ee_cpu_ops.expert_pairs import ADD_CHUNK, add_outputs, group_pairs
from hetero_ee_cpu_ops.grouped_matmul import (
    BIAS_CHUNK,
    BYTES_OUT,
    INTEGERS,
    MATRIX_IN,
    MATRIX_OUT,
    MEMBER_CHUNK,
    ExpertMatrix,
    multiply_pairs,
)
from hetero_ee_cpu_ops.jit.lazy import array_out, entry
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool, lead
from hetero_ee_cpu_ops.quantize import GROUP, whole_groups

NO_SUMS = np.zeros((0, 0), np.float32)  # stands for None


@entry(
    types.int64(
        *[MATRIX_IN] * 3, *[types.int64] * 2, *[INTEGERS] * 3, array_out(types.int64, 1), BYTES_OUT, *[MATRIX_OUT] * 4,
        *[types.int64] * 2,
    ),
    nogil=True,
)  # fmt: skip
def _run(
    x: Any, routes: Any, sums: Any, start: int, n_experts: int, first: Any, down: Any, functions: Any,
    activation: Any, workspace: Any, inner: Any, active: Any, outputs: Any, out: Any, shared: int, n_threads: int,
) -> int:  # fmt: skip
    """Compute the sums of all tokens.

    Args:
        first, down: descriptions of ExpertMatrix.
        functions: addresses of the chunk functions of members, biases, activations and sums.
        activation: chunk_arguments() of the activation, without addresses.
        workspace, inner, active, outputs: room for codes, the activation's inputs and outputs, and all pairs' outputs.
    """
    m, n_active = len(routes), routes.shape[1] // 2
    n_most = min(m * n_active, n_experts)
    nexts, experts, starts = np.empty(n_experts, np.int64), np.empty(n_most, np.int64), np.empty(n_most + 1, np.int64)
    rows, places = np.empty(m * n_active, np.int64), np.empty((m, n_active), np.int64)
    n = group_pairs(routes, start, nexts, experts, starts, rows, places)
    n_pairs, experts, member, bias = starts[n], experts[:n], functions[0], functions[1]
    multiply_pairs(x, experts, starts, rows, first, workspace, inner, member, bias, shared, n_threads)
    activation[INPUT], activation[OUT] = inner.ctypes.data, active.ctypes.data
    n_outputs = activation[ROW_VALUES]
    n_chunks = n_pairs * ((n_outputs + CHUNK - 1) // CHUNK)
    lead(shared if n_pairs * n_outputs >= SHARED_FROM else 0, functions[2], activation.ctypes.data, n_chunks)
    multiply_pairs(active, experts, starts, rows[:0], down, workspace, outputs, member, bias, shared, n_threads)
    add_outputs(outputs, routes, places, sums, out, functions[3], shared)
    return 0


class ExpertFfn:
    """The FFNs of a layer's experts, or of consecutive ones of them. Threads may share it.

    Args:
        first: gate_up, an expert's gate before its up, or up alone.
        start: index of the first expert in the layer.
        kind: of the activation, with gated and threshold: see activate().
    """

    def __init__(
        self,
        pool: ThreadPool,
        first: ExpertMatrix,
        down: ExpertMatrix,
        start: int,
        kind: str,
        *,
        gated: bool,
        threshold: float = 0.0,
    ) -> None:
        self._pool, self._first, self._down, self._start = pool, first, down, start
        size, self._active_size = first.n_rows // (2 if gated else 1), down.tiles.n_groups * GROUP
        if not 0 <= self._active_size - size < GROUP or first.n_experts != down.n_experts:
            raise ValueError(f"Experts of {first.n_rows} rows and then {self._active_size} columns do not fit.")
        self._has_padding = self._active_size != size
        self._activation = chunk_arguments(kind, size, self._active_size, gated=gated, threshold=threshold)
        chunks = MEMBER_CHUNK, BIAS_CHUNK, CHUNK_FUNCTION, ADD_CHUNK
        self._functions = np.array([each.address for each in chunks])

    def __call__(self, x: Any, routes: Any, sums: Any = None) -> Any:
        """Return each token's weighted sum of these experts' outputs, fp32 (m, n_rows of down).

        Args:
            x: contiguous fp32 (m, K).
            routes: contiguous fp32 (m, 2 n_active), indices of experts and then their weights; see pairs_of().
            sums: contiguous fp32 (m, n_rows of down), to which these are added, or None.

        Raises:
            ValueError: if a shape does not fit.
        """
        first, down, m = self._first, self._down, len(x)
        x, n_pairs = whole_groups(x, first.tiles.n_groups), routes.size // 2
        if len(routes) != m or not (sums is None or sums.shape == (m, down.n_rows)):
            shapes = f"Routes {routes.shape} and sums {None if sums is None else sums.shape}"
            raise ValueError(f"{shapes} do not fit {m} rows of activations.")
        inner, outputs, out = (
            np.empty(shape, np.float32) for shape in ((n_pairs, first.n_rows), (n_pairs, down.n_rows), (m, down.n_rows))
        )
        active = (np.zeros if self._has_padding else np.empty)((n_pairs, self._active_size), np.float32)
        workspace = np.empty(max(each.workspace_bytes(n_pairs) for each in (first, down)), np.uint8)
        shared = self._pool.enter()
        try:
            _run(
                x, routes, NO_SUMS if sums is None else sums, self._start, first.n_experts, first.description,
                down.description, self._functions, self._activation.copy(), workspace, inner, active, outputs, out,
                shared, self._pool.n_threads,
            )  # fmt: skip
        finally:
            self._pool.leave(shared)
        return out
