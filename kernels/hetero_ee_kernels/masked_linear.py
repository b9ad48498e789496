"""Masked product: out[m, N] = 2^e rows[n] . x + bias[n] if neuron n's score is > 0 or its token may not skip, else 0.

rows: int4 rows (row_matrix.py), N neurons, K columns: the first matrix of an FFN, of which a predictor's scores select
the rows to read. The product is h of sparse_ffn.py before its activation, bit for bit as on the CPU: a token's outputs
do not depend on m or on the other tokens. The bias is added to the rounded product.

Two launches, whatever the scores: one lists the neurons that a token needs of each block of 128 and writes zeros for
all; the other multiplies the listed rows by x.
"""

from typing import Any

import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED, check, check_given, output
from hetero_ee_kernels.row_matrix import RowMatrix, Skips
from hetero_ee_kernels.row_products import BLOCK, check_skips, empty_lists, listed, multiply

PASS_TOKENS = 128  # the lists of a whole prompt would need tens of MB


@triton.jit
def choose_kernel(
    scores_ptr: tl.tensor,
    may_skip_ptr: tl.tensor,
    neurons_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    n_used_ptr: tl.tensor,
    N: tl.constexpr,
) -> None:
    """List the neurons of one block that one token needs, in order, with their count; write zeros to out."""
    token = tl.program_id(0).to(tl.int64)
    place = token * ((N + BLOCK - 1) // BLOCK) + tl.program_id(1)
    neuron = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = neuron < N
    is_chosen = inside
    if may_skip_ptr is not None:
        may_skip = tl.load(may_skip_ptr + token) != 0
        score = tl.load(scores_ptr + token * N + neuron, mask=inside, other=0.0)
        is_chosen &= tl.where(may_skip, score > 0.0, True)
    _, count = listed(is_chosen, neuron, place, neurons_ptr, counts_ptr)
    tl.store(out_ptr + token * N + neuron, 0.0, mask=inside)
    if n_used_ptr is not None:
        tl.atomic_add(n_used_ptr, tl.where(may_skip, count, 0).to(tl.int64))


def masked_linear(
    x: Any, scores: Any, rows: RowMatrix, out: Any = None, *, bias: Any = None, may_skip: Any = None, n_used: Any = None
) -> Any:
    """Multiply x by the rows of wanted neurons and return out, which is 0 for the others.

    Args:
        x: fp32 (m, K).
        scores: fp32 (m, N), or None without may_skip.
        out: fp32 (m, N), allocated if None; may be `scores`.
        bias: fp32 (N,).
        may_skip: int32 (m,), 0 for tokens that need all neurons; None if all tokens do.
        n_used: int64 (1,), a counter to which the number of neurons computed for tokens that may skip is added.

    Raises:
        ValueError: if an operand does not fit.
    """
    m = len(x)
    out = output(out, x, (m, rows.n_rows))
    check("x", x, (m, rows.n_columns))
    check_given("bias", bias, (rows.n_rows,))
    if may_skip is not None:
        check("scores", scores, (m, rows.n_rows))
    check_skips(m, Skips(may_skip, n_used))
    for first in range(0, m, PASS_TOKENS):
        some = slice(first, min(first + PASS_TOKENS, m))
        neurons, counts = empty_lists(out[some])
        skip = (None, None) if may_skip is None else (scores[some], may_skip[some])
        choose_kernel[counts.shape](*skip, neurons, counts, out[some], n_used, rows.n_rows, num_warps=1, **UNFUSED)
        multiply(x[some], rows, neurons, counts, bias=bias, out=out[some])
    return out
