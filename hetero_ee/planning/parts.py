"""What the planner places: attention and FFN of each layer, embedding and head, with their bytes and products."""

from dataclasses import dataclass, replace
from typing import Self

from hetero_ee.layers.tensors import TensorRole, TensorSpec, is_in_rows
from hetero_ee.models.blocks import Block, BlockKind, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.model_weights import MATRIX_LAYOUTS, UNQUANTIZED, is_quantized
from hetero_ee.weights.rows import row_sizes
from hetero_ee.weights.tiles import region_bytes
from hetero_ee_profiles.hardware import DeviceTimes, needed_share

FLOAT_BYTES = 4
KV_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}  # of one value
KV_TYPE = "fp16"  # where none is asked for; see default_kv_type
KV_SCALE_BYTES = {"fp32": 0, "fp16": 0, "int8": 4}  # of one position and head


@dataclass(frozen=True, slots=True)
class Product:
    """One matmul of a part: y[m, n_rows] = x[m, n_columns] W^T."""

    layout: str
    n_rows: int
    n_columns: int

    @property
    def n_bytes(self) -> int:
        """Of its matrix in tiles, scales included."""
        return sum(region_bytes(self.layout, self.n_rows, self.n_columns))


@dataclass(frozen=True, slots=True)
class NeuronShares:
    """Of an FFN's neurons, what one token is expected to need."""

    active: float = 1.0  # of up and down
    first: float = 1.0  # of the matrix that says which are active, where a predictor spares rows of it

    @classmethod
    def of(cls, spec: ModelSpec, *, is_prompt: bool) -> Self:
        """A prompt's tokens are not left to the predictor."""
        return cls(spec.active_shares[is_prompt], 1.0 if is_prompt else spec.predicted_share)


ALL_NEURONS = NeuronShares()


@dataclass(frozen=True, slots=True)
class NeuronRows:
    """What a sparse FFN has neuron by neuron: up, where it has a gate, and down; with a predictor its first matrix."""

    n_rows: int  # of up and down
    n_columns: int
    n_first_rows: int = 0
    n_neurons: int = 0  # that share them

    @property
    def n_bytes(self) -> int:
        """Codes and scales."""
        return sum(row_sizes(self.n_rows + self.n_first_rows, self.n_columns))

    def read_bytes(self, shares: NeuronShares, m: int) -> int:
        """What m tokens read that need these shares of the neurons each."""
        n_rows = needed_share(shares.active, m) * self.n_rows + needed_share(shares.first, m) * self.n_first_rows
        return int(n_rows * sum(row_sizes(1, self.n_columns)))

    def read_s(self, times: DeviceTimes, shares: NeuronShares, m: int) -> float:
        """Seconds of multiplying with that, on the device of these times."""
        seconds = times.rows_s(self.n_rows, self.n_columns, m, shares.active)
        if self.n_first_rows:
            seconds += times.rows_s(self.n_first_rows, self.n_columns, m, shares.first)
        return seconds


@dataclass(frozen=True, slots=True)
class Part:
    """A unit of placement."""

    name: str
    kind: BlockKind
    layer: int | None
    products: tuple[Product, ...]
    weight_bytes: int  # of its tensors as stored; of the head with the final norm's, without a tied matrix
    kv_bytes_per_token: int  # what attention keeps of a position
    window_tokens: int | None
    neurons: NeuronRows | None = None  # of a sparse FFN, whose products are the rest
    shape: int = 0  # the same number for all parts that cost the same

    @property
    def product_bytes(self) -> int:
        """Of all its matrices."""
        return sum(product.n_bytes for product in self.products)

    def token_bytes(self, shares: NeuronShares) -> int:
        """Of all its matrices, what one token reads that needs these shares of a sparse FFN's neurons."""
        return self.product_bytes + (self.neurons.read_bytes(shares, 1) if self.neurons else 0)

    def kv_bytes(self, context_tokens: int) -> int:
        """Keys and values of one sequence of this length. A sliding window saves none: the cache keeps all."""
        return self.kv_bytes_per_token * context_tokens


def model_parts(spec: ModelSpec, kv_type: str, layout: str = "int4", vocabulary_layout: str = "int8") -> list[Part]:
    """The parts in the order a token passes them: embedding, attention and FFN of each layer, head."""
    every = decoder_blocks(spec)
    blocks = [block for block in every if block.kind is not BlockKind.FINAL_NORM]
    norm_bytes = sum(
        tensor_bytes(t, "fp32") for b in every if b.kind is BlockKind.FINAL_NORM for t in b.tensors.values()
    )
    shapes: dict[object, int] = {}
    parts = []
    for block in blocks:
        part = _part(spec, block, kv_type, layout, vocabulary_layout)
        if block.kind is BlockKind.HEAD:
            part = replace(part, weight_bytes=part.weight_bytes + norm_bytes)
        shape = part.kind, part.products, part.neurons, part.weight_bytes, part.window_tokens
        parts.append(replace(part, shape=shapes.setdefault(shape, len(shapes))))
    return parts


def is_multiplied(role: TensorRole) -> bool:
    """Whether such a tensor is multiplied with whole."""
    return is_quantized(role) and not is_in_rows(role)


def neuron_rows(block: Block) -> NeuronRows | None:
    """Of a sparse FFN, None of other blocks."""
    rows = [tensor for tensor in block.tensors.values() if is_in_rows(tensor.role)]
    if not rows:
        return None
    n_first = sum(tensor.shape[0] for tensor in rows if tensor.role is TensorRole.FIRST_ROWS)
    n_neurons, n_columns = rows[0].shape
    return NeuronRows(sum(tensor.shape[0] for tensor in rows) - n_first, n_columns, n_first, n_neurons)


def exit_map_products(hidden_size: int, rank: int) -> list[Product]:
    """What an exit map of this rank multiplies with, in 8 bits: nothing for 0, one matrix where the rank is full."""
    if rank in (0, hidden_size):
        return [Product("int8", hidden_size, hidden_size)] if rank else []
    return [Product("int8", rank, hidden_size), Product("int8", hidden_size, rank)]


def tensor_bytes(tensor: TensorSpec, layout: str) -> int:
    """Bytes of a tensor in memory, on every device alike; layout: of matrices, the rest is fp32."""
    if not is_quantized(tensor.role):
        return FLOAT_BYTES * tensor.n_elements
    if is_in_rows(tensor.role):
        return sum(row_sizes(*tensor.shape))
    return Product(layout, tensor.shape[0], tensor.shape[1]).n_bytes


def _part(spec: ModelSpec, block: Block, kv_type: str, layout: str, vocabulary_layout: str) -> Part:
    def layout_of(tensor: TensorSpec) -> str:
        return vocabulary_layout if tensor.role is TensorRole.VOCABULARY else MATRIX_LAYOUTS.get(tensor.role, layout)

    matrices = [tensor for tensor in block.tensors.values() if is_multiplied(tensor.role)]
    is_lookup = block.kind is BlockKind.EMBEDDING
    is_shared = block.kind is BlockKind.HEAD and spec.tied_head
    attends = block.kind is BlockKind.ATTENTION
    assert block.layer is not None or not attends
    return Part(
        name=block.name,
        kind=block.kind,
        layer=block.layer,
        products=() if is_lookup else tuple(Product(layout_of(t), t.shape[0], t.shape[1]) for t in matrices),
        weight_bytes=0 if is_shared else sum(tensor_bytes(t, layout_of(t)) for t in block.tensors.values()),
        neurons=neuron_rows(block),
        kv_bytes_per_token=kv_bytes_per_token(spec, kv_type) if attends else 0,
        window_tokens=spec.sliding_windows[block.layer] if attends and block.layer is not None else None,
    )


def default_kv_type(quantizer: str | None) -> str:
    """Where none is asked for. fp32 weights are what results are compared with: nothing is rounded beside them."""
    return "fp32" if quantizer == UNQUANTIZED else KV_TYPE


def kv_bytes_per_token(spec: ModelSpec, kv_type: str) -> int:
    """Keys and values of one position that one layer keeps."""
    return 2 * spec.n_kv_heads * (spec.head_dim * KV_BYTES[kv_type] + KV_SCALE_BYTES[kv_type])
