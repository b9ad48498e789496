"""Costs that a block of the model declares: the one description that planner, emulator and reports share.

Mixers declare their parameters and their state (hetero_ee/layers). From that follows what a block multiplies with,
which rows of neurons it reads, what it attends to and what it keeps per token. The planner adds these up. The emulated
machine charges them step by step, as the executor runs.
"""

from dataclasses import dataclass

from hetero_ee.costs.kv_types import KV_TYPE
from hetero_ee.costs.neurons import ALL_NEURONS, NeuronRows, NeuronShares
from hetero_ee.costs.product import Product, is_multiplied, tensor_bytes, tensor_product
from hetero_ee.costs.work import Overhead, Work
from hetero_ee.layers.state import State
from hetero_ee.models.blocks import Block, BlockKind
from hetero_ee.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Costs of one block, wherever it is computed."""

    weight_bytes: int  # of its tensors as stored; a tied head has none of its own
    products: tuple[Product, ...] = ()
    state: State | None = None  # of its mixer
    neurons: NeuronRows | None = None  # of a sparse FFN, in addition to the products
    overhead: Overhead = Overhead.NONE
    kv_type: str = KV_TYPE  # of keys and values

    @classmethod
    def of(cls, spec: ModelSpec, block: Block, kv_type: str = KV_TYPE) -> "BlockCost":
        """Return the declaration of a block."""
        matrices = [tensor for tensor in block.tensors.values() if is_multiplied(tensor.role)]
        is_lookup, is_head = block.kind is BlockKind.EMBEDDING, block.kind is BlockKind.HEAD
        overhead = Overhead.PASS if is_head else Overhead.NONE
        return cls(
            weight_bytes=0 if is_head and spec.tied_head else sum(map(tensor_bytes, block.tensors.values())),
            products=() if is_lookup else tuple(map(tensor_product, matrices)),
            state=block.state,
            neurons=NeuronRows.of(block),
            overhead=Overhead.HALF_LAYER if block.layer is not None else overhead,
            kv_type=kv_type,
        )

    @property
    def product_bytes(self) -> int:
        """Bytes of the matrices that every token reads whole."""
        return sum(product.n_bytes for product in self.products)

    def state_bytes(self, n_tokens: int) -> int:
        """Return the bytes of state of a sequence of n_tokens."""
        return 0 if self.state is None else self.state.n_bytes(n_tokens, self.kv_type)

    def work(
        self,
        name: str,
        m: int,
        context_tokens: int = 0,
        shares: NeuronShares = ALL_NEURONS,
        disk_bytes: int = 0,
    ) -> Work:
        """Return the work of m tokens, the last of a sequence of context_tokens. See Work for the other fields."""
        return Work(
            name,
            m,
            self.products,
            self.state,
            self.overhead,
            disk_bytes,
            neurons=self.neurons,
            shares=shares,
            context_tokens=context_tokens,
            kv_type=self.kv_type,
        )
