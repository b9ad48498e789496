"""Products of a token's x with the rows of listed neurons: 2^e rows[n] . x.

These are steps 1 and 2 of the CPU's sparse_ffn.py. A list belongs to one token and BLOCK neurons. Every token has its
own programs, which read its own neurons. Programs of the same block are adjacent, so that rows that several tokens need
come from the L2 cache.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED, check_given
from hetero_ee_kernels.quantize import quantize
from hetero_ee_kernels.row_matrix import RowMatrix, Skips
from hetero_ee_kernels.tile_group import codebook_entries, dot4, load_table
from hetero_ee_kernels.tile_matrix import CODEBOOK

BLOCK = tl.constexpr(128)  # neurons per list; in down they share the scales of their weights
KIND = tl.constexpr(CODEBOOK)  # codes of -8 .. 7 are looked up, too
NEURONS, UNROLLED = 16, 4  # neurons per program; units whose rows are loaded at once


@triton.jit
def listed(
    is_listed: tl.tensor, neuron: tl.tensor, list_number: tl.tensor, neurons_ptr: tl.tensor, counts_ptr: tl.tensor
) -> Any:
    """Write a list of neurons and its length to memory; return the neurons' places in the list, and the length."""
    ones = is_listed.to(tl.int32)
    at = list_number * BLOCK + tl.cumsum(ones, 0) - 1
    tl.store(neurons_ptr + at, neuron, mask=is_listed)
    count = tl.sum(ones, 0)
    tl.store(counts_ptr + list_number, count)
    return at, count


@triton.jit
def scales_of(at: tl.tensor) -> Any:
    """Load the word that holds the scales of a unit's two groups, and return both in fp32."""
    pair = tl.load(at)
    low = pair.to(tl.int16).to(tl.float16, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit(do_not_specialize=["n_neurons", "n_units", "n_quads", "n_blocks", "one"])
def products_kernel(
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    code_scales_ptr: tl.tensor,
    neurons_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    factor: tl.tensor,
    n_neurons: tl.tensor,
    n_units: tl.tensor,
    n_quads: tl.tensor,
    n_blocks: tl.tensor,
    one: tl.tensor,
    NEURONS: tl.constexpr,
    UNROLLED: tl.constexpr,
    ISA: tl.constexpr,
) -> None:
    """Multiply the rows of NEURONS listed neurons by their token's x.

    Args:
        words_ptr, scales_ptr, table_ptr, factor: RowMatrix.words, scale_pairs, table and factor.
        codes_ptr, code_scales_ptr: quantize(x), the codes as int32 words.
        neurons_ptr, counts_ptr: the lists, see empty_lists.
        hidden_ptr: None, or fp32 (m, blocks, BLOCK), multiplied in place by the products.
        bias_ptr, out_ptr: without hidden_ptr, fp32 (N,) or None, and fp32 (m, N) for products plus bias.
        one: 1, which the compiler does not know; see load_table.
    """
    token = tl.program_id(0).to(tl.int64)
    list_number = token * n_blocks + tl.program_id(1)
    slot = tl.program_id(2) * NEURONS + tl.arange(0, NEURONS)
    count = tl.load(counts_ptr + list_number)
    if tl.program_id(2) * NEURONS < count:
        at = list_number * BLOCK + tl.minimum(slot, count - 1)
        neuron = tl.load(neurons_ptr + at).to(tl.int64)
        word = tl.arange(0, 8)
        words_at = words_ptr + neuron[:, None] * (8 * n_units) + word[None, :]
        scales_at = scales_ptr + neuron * n_units
        codes_at = codes_ptr + token * n_quads * 32 + word % 4 * 4 + word // 4
        code_scales_at = code_scales_ptr + token // 2 * n_quads * 8 + token % 2 * 4
        table = load_table(table_ptr, ((slot * (one - 1))[:, None] + 0 * word[None, :]), KIND)
        total = tl.zeros((NEURONS,), tl.float32)
        nothing = tl.zeros((NEURONS, 8), tl.int32)
        for unit in tl.range(0, n_units, loop_unroll_factor=UNROLLED):
            first, second = codebook_entries(tl.load(words_at + 8 * unit), table, ISA)
            codes = codes_at + unit * 16
            first = tl.sum(dot4(first, tl.load(codes)[None, :], nothing, ISA), 1).to(tl.float32)
            second = tl.sum(dot4(second, tl.load(codes + 2)[None, :], nothing, ISA), 1).to(tl.float32)
            scale, next_scale = scales_of(scales_at + unit)
            code_scales = code_scales_at + unit // 2 * 8 + unit % 2 * 2
            total = tl.fma(first, scale * tl.load(code_scales), total)
            total = tl.fma(second, next_scale * tl.load(code_scales + 1), total)
        product = total * factor
        if hidden_ptr is not None:
            tl.store(hidden_ptr + at, tl.load(hidden_ptr + at) * product, mask=slot < count)
        else:
            if bias_ptr is not None:
                product += tl.load(bias_ptr + neuron)
            tl.store(out_ptr + token * n_neurons + neuron, product, mask=slot < count)


def empty_lists(values: Any) -> tuple[Any, Any]:
    """Allocate lists for values (m, N): int32 neuron numbers (m, blocks, 128), and int32 lengths of the lists."""
    m, n_neurons = values.shape
    n_blocks = -(-n_neurons // BLOCK.value)
    neurons = torch.empty((m, n_blocks, BLOCK.value), dtype=torch.int32, device=values.device)
    return neurons, neurons.new_empty(m, n_blocks)


def check_skips(m: int, skips: Skips) -> None:
    """Check what is only given for tokens that may skip neurons. Raises: ValueError: if it is wrong."""
    may_skip, n_used, least = skips
    if (least is not None or n_used is not None) and may_skip is None:
        raise ValueError("least and n_used apply to rows that may skip neurons, so may_skip is needed.")
    check_given("may_skip", may_skip, (m,), torch.int32)
    check_given("n_used", n_used, (1,), torch.int64)


def multiply(
    x: Any, rows: RowMatrix, neurons: Any, counts: Any, *, hidden: Any = None, bias: Any = None, out: Any = None
) -> None:
    """Multiply the listed neurons' rows by x (m, K). For other arguments, see products_kernel."""
    m, n_blocks = counts.shape
    codes, code_scales = quantize(x)
    operands = rows.words, rows.scale_pairs, rows.table, codes.view(torch.int32), code_scales, neurons, counts
    sizes = rows.factor, rows.n_rows, rows.n_units, codes.shape[1], n_blocks, 1
    constants = {"NEURONS": NEURONS, "UNROLLED": UNROLLED, "ISA": rows.isa}
    grid = (m, n_blocks, BLOCK.value // NEURONS)
    products_kernel[grid](*operands, hidden, bias, out, *sizes, **constants, num_warps=1, **UNFUSED)
