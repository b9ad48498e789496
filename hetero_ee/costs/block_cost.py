"""Define the costs of a block, the one description that planner, emulator and reports share.

Mixers declare their parameters and their state (hetero_ee/layers). These determine a block's products, the rows of
neurons that it reads, its attention and its memory per token. The planner adds costs up. The emulated machine charges
them step by step, as the executor runs.
"""

from dataclasses import dataclass, replace

from hetero_ee.costs.experts import ExpertRows
from hetero_ee.costs.kv_types import KV_TYPE
from hetero_ee.costs.neurons import ALL_NEURONS, NeuronShares
from hetero_ee.costs.product import Product, is_multiplied, tensor_bytes, tensor_product
from hetero_ee.costs.work import Overhead, Units, Work, units_of
from hetero_ee.layers.moe import MoeSpec
from hetero_ee.layers.state import State
from hetero_ee.models.blocks import Block, BlockKind
from hetero_ee.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Costs of one block, independent of the device that computes it."""

    weight_bytes: int  # bytes of the block's tensors as stored; 0 for a tied head
    products: tuple[Product, ...] = ()
    state: State | None = None  # of its mixer
    units: Units | None = None  # neurons or experts of which a token needs some, in addition to the products
    overhead: Overhead = Overhead.NONE
    kv_type: str = KV_TYPE  # of keys and values
    activation_terms: int = 1  # see ModelSpec

    @classmethod
    def of(cls, spec: ModelSpec, block: Block, kv_type: str = KV_TYPE) -> "BlockCost":
        """Derive the costs of a block from its parameters and state."""
        units = units_of(block)
        if isinstance(units, ExpertRows):
            units = replace(units, independent_tokens=spec.independent_tokens)
        chosen = block.mixer.expert_matrices if isinstance(block.mixer, MoeSpec) else ()
        matrices = [
            tensor for short, tensor in block.tensors.items() if is_multiplied(tensor.role) and short not in chosen
        ]
        products = tuple(map(tensor_product, matrices))
        is_lookup, is_head = block.kind is BlockKind.EMBEDDING, block.kind is BlockKind.HEAD
        overhead = Overhead.PASS if is_head else Overhead.NONE
        return cls(
            weight_bytes=0 if is_head and spec.tied_head else sum(map(tensor_bytes, block.tensors.values())),
            products=() if is_lookup else (*([units.router] if isinstance(units, ExpertRows) else []), *products),
            state=block.state,
            units=units,
            overhead=Overhead.HALF_LAYER if block.layer is not None else overhead,
            kv_type=kv_type,
            activation_terms=spec.activation_terms,
        )

    @property
    def product_bytes(self) -> int:
        """Bytes of the matrices that are read whole for every token, apart from units."""
        return sum(product.n_bytes for product in self.products)

    def state_bytes(self, n_tokens: int, n_sequences: int = 1) -> int:
        """Return the bytes of the block's states of n_sequences sequences, which have n_tokens tokens together."""
        return 0 if self.state is None else self.state.n_bytes(n_tokens, self.kv_type, n_sequences)

    def work(
        self,
        name: str,
        m: int,
        context_tokens: int = 0,
        shares: NeuronShares = ALL_NEURONS,
    ) -> Work:
        """Return the work of m tokens, the last ones of a sequence of context_tokens. See Work for the other fields.

        The shares of experts are those of the block's router, whatever `shares` says.
        """
        return Work(
            name,
            m,
            self.products,
            self.state,
            self.overhead,
            units=self.units,
            shares=self.units.shares if isinstance(self.units, ExpertRows) else shares,
            context_tokens=context_tokens,
            kv_type=self.kv_type,
            activation_terms=self.activation_terms,
        )
