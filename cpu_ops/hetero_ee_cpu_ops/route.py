"""The router of a mixture of experts, fp32: logits of all experts, the choice of a few, and their weights.

Each logit is summed in 16 lanes (feature i in lane i mod 16, one fused multiply-add each), then over lanes in a fixed
tree. The experts with the largest scores are chosen, the lower one of two with equal scores. Sums of weights are added
in the order of experts, lane by lane. So a token's choice and weights depend on its row alone.
Valid for widths that are multiples of 16 and up to 64 experts per token. Source: derived.
"""

from typing import Any

import numpy as np
from numba import types

from hetero_ee_cpu_ops.activate import sigmoid
from hetero_ee_cpu_ops.jit.kernel_files import inner
from hetero_ee_cpu_ops.jit.lazy import Chunk, array_in, array_out, entry
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool, lead
from hetero_ee_cpu_ops.simd.bytes import word, zeros
from hetero_ee_cpu_ops.simd.floats import (
    add,
    element_bytes,
    exponential,
    lane_sum,
    load16,
    load_lanes,
    multiply,
    multiply_add,
    operation,
    read_float,
    scratch,
    spread,
    store16,
    store_lanes,
    subtract,
    write_float,
    write_integer,
)
from hetero_ee_cpu_ops.simd.tuples import add_products, store_sums

F32, BF16 = np.float32(0), np.int16(0)  # types of a loaded value
MINUS_INFINITY, LOWEST = np.float32(-np.inf), np.finfo(np.float32).min  # keys of no expert; of one whose score is NaN
KINDS = {"softmax": 0, "sigmoid": 1, "softmax_of_chosen": 2}
MAX_ACTIVE, CHOSEN_BYTES = 64, 512
# A token's frame: its chosen experts, int64, their keys, fp32, and sums and marks of groups, fp32.
SUMS, MARKS, MAX_GROUPS = CHOSEN_BYTES + 256, CHOSEN_BYTES + 512, 64
FRAME_BYTES = CHOSEN_BYTES + 768
TILE = 16  # tokens and experts whose logits a thread computes at a time: 128 KB of weights, 2,048 wide
CHOSEN_TOKENS = 8  # tokens for which a thread chooses experts at a time
FOUR, EIGHT, SIXTEEN = (0,) * 4, (0,) * 8, (0,) * 16
(
    X, WEIGHTS, BIAS, CHOICE_BIAS, FACTORS, LOGITS, OUT, WIDTH, N_TOKENS, N_EXPERTS, N_ACTIVE, KIND, RENORMALIZES,
    N_GROUPS, N_CHOSEN_GROUPS, N_BEST, SCALE, ADDED, N_ARGUMENTS,
) = range(19)  # fmt: skip

divide = operation(2, lambda a, b: a / b, "divide", "a / b.")


@inner
def _logits(arguments: int, tokens: Any, experts: Any, token: int, expert: int, element: Any) -> None:
    """Compute len(experts) logits, an equal number for each of len(tokens) tokens. element: type of a weight."""
    width, size = word(arguments, WIDTH), element_bytes(element)
    x, weights = word(arguments, X) + 4 * width * token, word(arguments, WEIGHTS) + size * width * expert
    totals = zeros(experts)
    for i in range(0, width, 16):
        totals = add_products(totals, tokens, x + 4 * i, 4 * width, weights + size * i, size * width, element)
    n = 4 * word(arguments, N_EXPERTS)
    store_sums(totals, tokens, word(arguments, LOGITS) + n * token + 4 * expert, n)


def _logit_chunk(element: Any) -> Chunk:
    def chunk(arguments: int, index: int) -> None:
        """Compute a tile of logits."""
        n_across = (word(arguments, N_EXPERTS) + TILE - 1) // TILE
        first_token, expert = index // n_across * TILE, index % n_across * TILE
        end_token = min(first_token + TILE, word(arguments, N_TOKENS))
        end = min(expert + TILE, word(arguments, N_EXPERTS))
        while expert < end:
            n = 8 if expert + 8 <= end else 1
            token = first_token
            while n == 8 and token + 4 <= end_token:
                _logits(arguments, FOUR, SIXTEEN, token, expert, element)
                _logits(arguments, FOUR, SIXTEEN, token, expert + 4, element)
                token += 4
            while token < end_token:
                if n == 8:
                    _logits(arguments, (0,), EIGHT, token, expert, element)
                else:
                    _logits(arguments, (0,), (0,), token, expert, element)
                token += 1
            expert += n

    return Chunk(chunk)


@inner
def _key(arguments: int, scores: int, expert: int) -> Any:
    """Return an expert's score for the choice, LOWEST for NaN and -inf: above those of groups that are not chosen."""
    key, bias = read_float(scores + 4 * expert), word(arguments, CHOICE_BIAS)
    if bias:
        key += read_float(bias + 4 * expert)
    return max(LOWEST, key)  # in this order: no comparison with NaN is true


@inner
def _mark_groups(arguments: int, scores: int, frame: int, size: int) -> None:
    """Write 1 for the groups with the largest sums of their best keys to the frame, and 0 for others."""
    n_groups = word(arguments, N_GROUPS)
    for group in range(n_groups):
        best, second = MINUS_INFINITY, MINUS_INFINITY
        for expert in range(group * size, group * size + size):
            key = _key(arguments, scores, expert)
            second = max(second, min(best, key))
            best = max(best, key)
        write_float(np.float32(best + second) if word(arguments, N_BEST) == 2 else best, frame + SUMS + 4 * group)
    for group in range(n_groups):
        own, n_before = read_float(frame + SUMS + 4 * group), 0
        for other in range(n_groups):
            found = read_float(frame + SUMS + 4 * other)
            if found > own or (found == own and other < group):
                n_before += 1
        write_float(np.float32(n_before < word(arguments, N_CHOSEN_GROUPS)), frame + MARKS + 4 * group)


@inner
def _choose(arguments: int, scores: int, chosen: int) -> None:
    """Write the indices of a token's chosen experts to the frame `chosen`, from the highest to the lowest."""
    n, keys = word(arguments, N_ACTIVE), chosen + CHOSEN_BYTES
    is_limited, n_experts = word(arguments, N_CHOSEN_GROUPS) < word(arguments, N_GROUPS), word(arguments, N_EXPERTS)
    size = n_experts // word(arguments, N_GROUPS)
    if is_limited:
        _mark_groups(arguments, scores, chosen, size)
    for expert in range(n_experts):
        key = _key(arguments, scores, expert)
        if is_limited and read_float(chosen + MARKS + 4 * (expert // size)) == 0:
            key = MINUS_INFINITY
        place = min(expert, n)
        if place == n:
            place -= 1
            if not key > read_float(keys + 4 * place):
                continue
        while place > 0 and key > read_float(keys + 4 * (place - 1)):
            write_float(read_float(keys + 4 * (place - 1)), keys + 4 * place)
            write_integer(word(chosen, place - 1), chosen + 8 * place)
            place -= 1
        write_float(key, keys + 4 * place)
        write_integer(expert, chosen + 8 * place)
    for end in range(1, n):
        expert, place = word(chosen, end), end
        while place > 0 and expert > word(chosen, place - 1):
            write_integer(word(chosen, place - 1), chosen + 8 * place)
            place -= 1
        write_integer(expert, chosen + 8 * place)


@inner
def _normalize(x: int, n: int, total: Any, scale: Any) -> None:
    """Divide n values by `total`, and multiply them by `scale`."""
    for i in range(0, n, 16):
        count = min(16, n - i)
        value = divide(load_lanes(x + 4 * i, 0, count, F32), spread(total))
        store_lanes(multiply(value, spread(scale)), x + 4 * i, count, F32)


@inner
def _sum(x: int, n: int) -> Any:
    total = spread(F32)
    for i in range(0, n, 16):
        total = add(total, load_lanes(x + 4 * i, 0, min(16, n - i), F32))
    return lane_sum(total)


@inner
def _exponentials(x: int, n: int) -> None:
    """Replace n values by e^(value - the largest one)."""
    largest = read_float(x)
    for i in range(1, n):
        largest = max(largest, read_float(x + 4 * i))
    for i in range(0, n, 16):
        count = min(16, n - i)
        shifted = subtract(load_lanes(x + 4 * i, 0, count, F32), spread(largest))
        store_lanes(exponential(shifted), x + 4 * i, count, F32)


@inner
def _route(arguments: int, token: int, chosen: int) -> None:
    """Choose one token's experts and compute their weights from its logits, in place."""
    n, n_active, kind = word(arguments, N_EXPERTS), word(arguments, N_ACTIVE), word(arguments, KIND)
    scores, bias = word(arguments, LOGITS) + 4 * n * token, word(arguments, BIAS)
    for i in range(0, n, 16):
        count = min(16, n - i)
        value = load_lanes(scores + 4 * i, 0, count, F32)
        if bias:
            value = add(value, load_lanes(bias + 4 * i, 0, count, F32))
        store_lanes(sigmoid(value) if kind == 1 else value, scores + 4 * i, count, F32)
    _choose(arguments, scores, chosen)
    if kind == 0:
        _exponentials(scores, n)
    out = word(arguments, OUT) + 8 * n_active * token
    weights = out + 4 * n_active
    for place in range(n_active):
        expert = word(chosen, place)
        write_float(np.float32(expert), out + 4 * place)
        write_float(read_float(scores + 4 * expert), weights + 4 * place)
    if kind == 2:
        _exponentials(weights, n_active)
    one, scale = np.float32(1), read_float(arguments + 8 * SCALE)
    if kind == 0:
        _normalize(weights, n_active, _sum(scores, n), one)
    elif kind == 2:
        _normalize(weights, n_active, _sum(weights, n_active), one)
    total = one
    if word(arguments, RENORMALIZES):
        total = _sum(weights, n_active) + read_float(arguments + 8 * ADDED)
    _normalize(weights, n_active, total, scale)
    factors = word(arguments, FACTORS)
    for place in range(n_active if factors else 0):
        factor = read_float(factors + 4 * word(chosen, place))
        write_float(read_float(weights + 4 * place) * factor, weights + 4 * place)


def _choice_chunk(arguments: int, index: int) -> None:
    chosen = scratch(FRAME_BYTES)
    first = index * CHOSEN_TOKENS
    for token in range(first, min(first + CHOSEN_TOKENS, word(arguments, N_TOKENS))):
        _route(arguments, token, chosen)


LOGIT_CHUNK, BF16_LOGIT_CHUNK, CHOICE_CHUNK = _logit_chunk(F32), _logit_chunk(BF16), Chunk(_choice_chunk)


class RouterRule:
    """A router's parameters, with its addresses prepared for the kernels.

    Args:
        weights: contiguous fp32 (n_experts, width), width a multiple of 16.
        vectors: fp32 (n_experts,) added to the logits; added to the scores for the choice only; factors of the weights.
            None for those that the router lacks.
        n_active: experts per token.
        kind: a key of KINDS.
        renormalizes: whether a token's weights are divided by their sum plus `added`.
        scale: of the weights.
        groups: number of groups, of those with a token's experts, and of the best keys whose sum chooses these, 1 or 2.

    Raises:
        ValueError: if a number is impossible.
    """

    def __init__(
        self,
        weights: Any,
        vectors: tuple[Any, Any, Any],
        n_active: int,
        kind: str,
        *,
        renormalizes: bool,
        scale: float,
        added: float,
        groups: tuple[int, int, int] = (1, 1, 1),
    ) -> None:
        self.n_experts, self.width = weights.shape
        if self.width % 16 or not 0 < n_active <= min(self.n_experts, MAX_ACTIVE) or groups[0] > MAX_GROUPS:
            raise ValueError(f"{n_active} of {weights.shape} experts do not fit.")
        bits = weights.view(np.uint32)
        self.is_bf16 = not (bits & 0xFFFF).any()  # as most are published: half the bytes of fp32, with the same values
        weights = (bits >> 16).astype(np.uint16) if self.is_bf16 else weights
        self.n_active, self._kept = n_active, (weights, vectors)
        self.arguments = np.zeros(N_ARGUMENTS, np.int64)
        addresses = [0 if each is None else each.ctypes.data for each in (weights, *vectors)]
        self.arguments[[WEIGHTS, BIAS, CHOICE_BIAS, FACTORS]] = addresses
        self.arguments[[WIDTH, N_EXPERTS, N_ACTIVE]] = self.width, self.n_experts, n_active
        self.arguments[[KIND, RENORMALIZES]] = KINDS[kind], renormalizes
        self.arguments[[N_GROUPS, N_CHOSEN_GROUPS, N_BEST]] = groups
        self.arguments[SCALE:].view(np.float32)[::2] = scale, added


@entry(
    types.int64(
        array_in(types.float32, 2), array_in(types.int64, 1), array_out(types.float32, 2), array_out(types.float32, 2),
        *[types.int64] * 3,
    ),
    nogil=True,
)  # fmt: skip
def _enter(x: Any, rule: Any, logits: Any, out: Any, logit_chunk: int, choice_chunk: int, shared: int) -> int:
    arguments, m = rule.copy(), len(x)
    arguments[X], arguments[N_TOKENS] = x.ctypes.data, m
    arguments[LOGITS], arguments[OUT] = logits.ctypes.data, out.ctypes.data
    n_tiles = ((m + TILE - 1) // TILE) * ((arguments[N_EXPERTS] + TILE - 1) // TILE)
    lead(shared, logit_chunk, arguments.ctypes.data, n_tiles)
    lead(shared, choice_chunk, arguments.ctypes.data, (m + CHOSEN_TOKENS - 1) // CHOSEN_TOKENS)
    return 0


def route(x: Any, rule: RouterRule, pool: ThreadPool) -> Any:
    """Choose experts for each row of x, contiguous fp32 (m, width).

    Returns:
        fp32 (m, 2 n_active): the indices of the chosen experts, from the highest to the lowest, then their weights.

    Raises:
        ValueError: if x does not fit.
    """
    m = len(x)
    if x.shape != (m, rule.width):
        raise ValueError(f"x {x.shape} and a router of {rule.width} features do not fit.")
    logits, out = np.empty((m, rule.n_experts), np.float32), np.empty((m, 2 * rule.n_active), np.float32)
    logit_chunk, shared = BF16_LOGIT_CHUNK if rule.is_bf16 else LOGIT_CHUNK, pool.enter()
    try:
        _enter(x, rule.arguments, logits, out, logit_chunk.address, CHOICE_CHUNK.address, shared)
    finally:
        pool.leave(shared)
    return out


def _gate_chunk(arguments: int, index: int) -> None:
    """Multiply rows of X by the sigmoid of the product of their rows of LOGITS with WEIGHTS."""
    width, n_features, weights = word(arguments, WIDTH), word(arguments, N_EXPERTS), word(arguments, WEIGHTS)
    first = index * CHOSEN_TOKENS
    for row in range(first, min(first + CHOSEN_TOKENS, word(arguments, N_TOKENS))):
        inputs, total = word(arguments, LOGITS) + 4 * width * row, spread(F32)
        for i in range(0, 4 * width, 64):
            total = multiply_add(load16(inputs + i, F32), load16(weights + i, F32), total)
        factor, x = sigmoid(spread(lane_sum(total))), word(arguments, X) + 4 * n_features * row
        for i in range(0, 4 * n_features, 64):
            store16(multiply(load16(x + i, F32), factor), x + i)


GATE_CHUNK = Chunk(_gate_chunk)


def gate_rows(x: Any, inputs: Any, weights: Any, pool: ThreadPool) -> Any:
    """Multiply each row of x, in place, by sigmoid(weights inputs), and return x.

    Args:
        x: contiguous fp32 (m, n), n a multiple of 16.
        inputs: contiguous fp32 (m, width), width a multiple of 16.
        weights: contiguous fp32 (1, width).

    Raises:
        ValueError: if a shape does not fit.
    """
    (m, n), width = x.shape, inputs.shape[1]
    if inputs.shape != (m, width) or weights.shape != (1, width) or n % 16 or width % 16:
        raise ValueError(f"x {x.shape}, inputs {inputs.shape} and weights {weights.shape} do not fit.")
    arguments = np.zeros(N_ARGUMENTS, np.int64)
    arguments[[X, LOGITS, WEIGHTS]] = [each.ctypes.data for each in (x, inputs, weights)]
    arguments[[WIDTH, N_TOKENS, N_EXPERTS]] = width, m, n
    pool.run(GATE_CHUNK.address, arguments, -(-m // CHOSEN_TOKENS))
    return x
