"""Matrix products of a mixture of experts, one launch per matrix, and the weighted sums of their outputs.

All experts' matrices are one matrix in tiles, one expert after the other. A pair is a token and an expert that it has
chosen (expert_pairs.py). Each output has the bits that its row of x has in the product with the expert's matrix alone
(matmul.py). Source: derived.
"""

from typing import Any

import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED, check, check_given, output
from hetero_ee_kernels.expert_pairs import MOST_PER_PROGRAM, Pairs
from hetero_ee_kernels.matmul import launch
from hetero_ee_kernels.quantize import quantize
from hetero_ee_kernels.tile_matrix import TileMatrix, check_rows

WIDTH, N_WARPS = 512, 4  # of add_kernel


def expert_matmul(x: Any, weight: TileMatrix, pairs: Pairs, out: Any, bias: Any = None) -> Any:
    """Return each pair's product with its expert's rows of a matrix; pairs of other devices are left as they are.

    Args:
        x: fp32 (m, K), a row per token, or (n_pairs, K), a row per pair.
        out: fp32 (n_pairs, rows of an expert); these are a multiple of 16.
        bias: fp32, one per row of the matrix, or None.

    Raises:
        ValueError: if an operand does not fit.
    """
    check_rows(x, weight)
    n_rows, n_pairs = out.shape[-1], pairs.n_pairs
    output(out, x, (n_pairs, n_rows))
    if not len(x) or n_pairs % len(x) or n_rows % 16 or weight.n_rows % n_rows:
        raise ValueError(f"{len(x)} rows, {n_pairs} pairs and {n_rows} of {weight.n_rows} rows do not fit.")
    check_given("bias", bias, (weight.n_rows,))
    quantized = quantize(x, weight.n_terms, pairs.order, n_pairs // len(x))
    of_experts = pairs.experts, pairs.order, bias, weight.n_rows // n_rows
    launch(weight, quantized, out, pairs.n_tokens, of_experts, has_more=pairs.n_tokens == MOST_PER_PROGRAM)
    return out


@triton.jit(do_not_specialize=["start", "n_experts"])
def add_kernel(
    outputs_ptr: tl.tensor,
    routes_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    out_ptr: tl.tensor,
    start: tl.tensor,
    n_experts: tl.tensor,
    N_ACTIVE: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Add a token's outputs in the order of its choices, each product rounded before it is added."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < N
    total = tl.zeros((WIDTH,), tl.float32)
    if sums_ptr is not None:
        total = tl.load(sums_ptr + token * N + column, mask=inside, other=0.0)
    for choice in range(N_ACTIVE):
        expert = tl.load(routes_ptr + token * (2 * N_ACTIVE) + choice).to(tl.int32) - start
        weight = tl.load(routes_ptr + token * (2 * N_ACTIVE) + N_ACTIVE + choice)
        is_here = (expert >= 0) & (expert < n_experts)
        at = outputs_ptr + (token * N_ACTIVE + choice) * N + column
        found = tl.load(at, mask=column < tl.where(is_here, N, 0), other=0.0)
        total = tl.where(is_here, total + found * weight, total)
    tl.store(out_ptr + token * N + column, total, mask=inside)


def add_experts(outputs: Any, routes: Any, start: int, n_experts: int, sums: Any, out: Any) -> Any:
    """Return each token's weighted sum of the outputs of n_experts experts from index `start` on, added to `sums`.

    Args:
        outputs: fp32 (m * n_active, N).
        routes: fp32 (m, 2 n_active), indices of experts and then their weights.
        sums: fp32 (m, N), None for 0; may be out.
        out: fp32 (m, N).

    Raises:
        ValueError: if an operand does not fit.
    """
    m, n_active, n = len(routes), routes.shape[1] // 2, out.shape[1]
    for name, tensor, shape in (
        ("outputs", outputs, (m * n_active, n)),
        ("routes", routes, (m, 2 * n_active)),
        ("out", out, (m, n)),
    ):
        check(name, tensor, shape)
    check_given("sums", sums, (m, n))
    if m:
        sizes: dict[str, Any] = {"N_ACTIVE": n_active, "N": n, "WIDTH": WIDTH, "num_warps": N_WARPS}
        add_kernel[(m, triton.cdiv(n, WIDTH))](outputs, routes, sums, out, start, n_experts, **sizes, **UNFUSED)
    return out
