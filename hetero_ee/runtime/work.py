"""Work: what one block of a pass does, in numbers, and the seconds it takes by a profile.

From the profile alone, so that an emulated machine checks the planner's predictions and does not repeat them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from hetero_ee.kv.batch import Batch
from hetero_ee.layers.tensors import TensorRole, TensorSpec
from hetero_ee.models.blocks import Block, BlockKind
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.hot import halves
from hetero_ee.planning.parts import (
    ALL_NEURONS,
    FLOAT_BYTES,
    NeuronRows,
    NeuronShares,
    Product,
    is_multiplied,
    kv_bytes_per_token,
    neuron_rows,
)
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.weights.model_weights import MATRIX_LAYOUTS
from hetero_ee_profiles.hardware import DeviceTimes

VOCABULARY_LAYOUT = "int8"  # of embedding, head, exit map
EXIT_MAP, DRAFT_VOCABULARY, CHOICE, JUDGE = "exit_map", "draft_vocabulary", "draft_choice", "exit_predictor"
CANDIDATES = "candidates"
MAX_DECODE_TOKENS = 16  # up to so many, attention takes reading keys and values once, and a little for each more


class Overhead(Enum):
    """What a block costs besides products and attention."""

    NONE = "none"
    HALF_LAYER = "half a layer"
    PASS = "pass"  # what a pass costs outside of its layers: charged to the head


@dataclass(frozen=True, slots=True)
class Attention:
    n_positions: int  # that a batch reads, each at most once
    kv_bytes_per_token: int  # of one layer as kept


@dataclass(frozen=True, slots=True)
class Work:
    """m tokens through one block."""

    name: str
    m: int
    products: tuple[tuple[str, int, int], ...] = ()  # (layout, n_rows, n_columns) of each matrix
    attention: Attention | None = None
    overhead: Overhead = Overhead.NONE
    disk_bytes: int = 0  # read from the disk meanwhile
    neurons: NeuronRows | None = None  # of a sparse FFN
    shares: NeuronShares = ALL_NEURONS  # of its neurons, that each token is expected to need


def joined_name(works: Sequence[Work]) -> str:
    """What to call all of them at once, where they can't be told apart."""
    if not works:
        return "other work"
    return works[0].name if len(works) == 1 else f"{works[0].name} to {works[-1].name}"


def stored_layout(tensor: TensorSpec) -> str:
    """The layout a converted model's matrices have: 8 bits for embedding, head and what needs them, 4 for the rest."""
    return VOCABULARY_LAYOUT if tensor.role is TensorRole.VOCABULARY else MATRIX_LAYOUTS.get(tensor.role, "int4")


def block_works(
    spec: ModelSpec,
    blocks: Sequence[Block],
    batch: Batch,
    *,
    kv_bytes_per_token: int,
    disk_bytes: Callable[[Block], int] = lambda block: 0,
) -> list[Work]:
    """One work for each of these blocks, the whole batch through all of them. kv_bytes_per_token: of one layer's cache.

    disk_bytes: that a block has to be read from the disk for each pass.
    """
    m, context_tokens = len(batch), max(batch.positions) + 1
    works = []
    for block in blocks:
        attention = None
        if block.kind is BlockKind.ATTENTION:
            attention = Attention(_positions_read(spec, block, m, context_tokens), kv_bytes_per_token)
        work = block_work(block, m, attention=attention, disk_bytes=disk_bytes(block))
        works.append(replace(work, shares=NeuronShares.of(spec, is_prompt=batch.is_prompt)) if work.neurons else work)
    return works


def block_work(block: Block, m: int, *, attention: Attention | None = None, disk_bytes: int = 0) -> Work:
    """m tokens through the block. A matrix that is only looked up in is no product."""
    matrices = [t for t in block.tensors.values() if is_multiplied(t.role)]
    products = () if block.kind is BlockKind.EMBEDDING else tuple((stored_layout(t), *_shape(t)) for t in matrices)
    if block.layer is not None:
        overhead = Overhead.HALF_LAYER
    else:
        overhead = Overhead.PASS if block.kind is BlockKind.HEAD else Overhead.NONE
    return Work(block.name, m, products, attention, overhead, disk_bytes, neuron_rows(block))


def split_works(spec: ModelSpec, block: Block, batch: Batch, placement: str) -> tuple[Work, Work, Work]:
    """Of a split FFN: what the GPU does first, what it does of its neurons, and the CPU of the others."""
    work, shares = block_work(block, len(batch)), NeuronShares.of(spec, is_prompt=batch.is_prompt)
    assert work.neurons is not None, "not a sparse FFN"
    products = [Product(*product) for product in work.products]
    whole, hot, cold = halves(products, work.neurons, placement, shares, spec.hot_curve)
    first = replace(work, products=_numbers(whole), neurons=None)
    mine = replace(work, products=_numbers(hot.products), neurons=hot.neurons, shares=hot.shares)
    other = replace(work, products=_numbers(cold.products), neurons=cold.neurons, shares=cold.shares)
    return first, replace(mine, overhead=Overhead.NONE), other


def _numbers(products: Iterable[Product]) -> tuple[tuple[str, int, int], ...]:
    return tuple((product.layout, product.n_rows, product.n_columns) for product in products)


def logits_works(block: Block, m: int, end: DraftEnd) -> list[Work]:
    """m states through the end's map and its head, or the model's, which this block is."""
    works, head = [], block_work(block, m)
    if end.state_map is not None:
        matrices = [weight.shape for weight in (end.state_map.down, end.state_map.up) if weight is not None]
        works.append(Work(EXIT_MAP, m, tuple((VOCABULARY_LAYOUT, *shape) for shape in matrices)))
    if end.vocabulary is not None:
        head = replace(head, name=DRAFT_VOCABULARY, products=((VOCABULARY_LAYOUT, *end.vocabulary.rows.shape),))
    return [*works, head]


def draft_works(block: Block, m: int, end: DraftEnd) -> list[Work]:
    """The same on a GPU, and what chooses and judges: it reads the logits once, as a product with 4 columns would be
    read, and the judge's network. Norm and other small kernels are as in half a layer: the host has nothing to do."""
    works = logits_works(block, m, end)
    works[-1] = replace(works[-1], overhead=Overhead.HALF_LAYER)
    works.append(Work(CHOICE, m, ((VOCABULARY_LAYOUT, works[-1].products[-1][1], FLOAT_BYTES),)))
    if end.judge is not None:
        works.append(Work(JUDGE, m, ((VOCABULARY_LAYOUT, *end.judge.network[0].shape),)))
    return works


def partial_works(block: Block, m: int, k: int, end: DraftEnd) -> list[Work]:
    """m states through the end's map and k rows of the head for each. A row of the head costs the time of 8: a tile's
    line holds 16 rows, and memory is read by half of it."""
    *maps, head = logits_works(block, m, end)
    (_, n_rows, n_columns) = head.products[-1]
    sliced = ((VOCABULARY_LAYOUT, min(n_rows, 8 * m * k), n_columns),)
    return [*maps, replace(head, name=CANDIDATES, products=sliced, overhead=Overhead.HALF_LAYER)]


def work_s(work: Work, times: DeviceTimes, disk_bytes_per_s: float, spec: ModelSpec) -> float:
    """Seconds of the work on the device of these times; where the disk is slower, the disk's.

    Raises KeyError for a layout that the device has no times of.
    """
    seconds = sum(times.matmul_s(layout, n_rows, n_columns, work.m) for layout, n_rows, n_columns in work.products)
    if work.neurons is not None:
        seconds += work.neurons.read_s(times, work.shares, work.m)
    if work.overhead is Overhead.HALF_LAYER:
        seconds += times.layer_overhead_s(spec.hidden_size, spec.ffn_size, work.m) / 2
    elif work.overhead is Overhead.PASS:
        seconds += times.pass_overhead_s(spec.hidden_size, spec.ffn_size, work.m)
    if work.attention is not None:
        seconds += _attention_s(work.attention, work.m, times, spec)
    return max(seconds, work.disk_bytes / disk_bytes_per_s)


def _attention_s(attention: Attention, m: int, times: DeviceTimes, spec: ModelSpec) -> float:
    """A decode batch reads what is kept once; its type may be another than the one that was timed."""
    heads, few = (spec.n_heads, spec.n_kv_heads, spec.head_dim), m <= MAX_DECODE_TOKENS
    kept_share = attention.kv_bytes_per_token / kv_bytes_per_token(spec, times.kv_type)
    return times.attention_s(*heads, m, attention.n_positions, few=few, kept_share=kept_share)


def _positions_read(spec: ModelSpec, block: Block, m: int, context_tokens: int) -> int:
    """By m tokens of a sequence of context_tokens with them, inside the layer's window; each reads itself."""
    window = None if block.layer is None else spec.sliding_windows[block.layer]
    seen = context_tokens if window is None else min(context_tokens, window + m - 1)
    return max(seen, m)


def _shape(tensor: TensorSpec) -> tuple[int, int]:
    n_rows, n_columns = tensor.shape
    return n_rows, n_columns
