"""Costs that a block of the model declares: the one description that planner, emulator and reports share.

Mixers declare their parameters and their state (hetero_ee/layers). From that follows what a block multiplies with,
which rows of neurons it reads, what it attends to and what it keeps per token. The planner adds these up. The emulated
machine charges them step by step, as the executor runs.
"""

from dataclasses import dataclass

from hetero_ee.costs.neurons import ALL_NEURONS, NeuronRows, NeuronShares
from hetero_ee.costs.product import Product, is_multiplied, tensor_bytes, tensor_product
from hetero_ee.costs.work import AttentionCost, Overhead, Work
from hetero_ee.models.blocks import Block, BlockKind
from hetero_ee.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Costs of one block, wherever it is computed."""

    weight_bytes: int  # of its tensors as stored; a tied head has none of its own
    products: tuple[Product, ...] = ()
    attention: AttentionCost | None = None
    neurons: NeuronRows | None = None  # of a sparse FFN, in addition to the products
    overhead: Overhead = Overhead.NONE

    @classmethod
    def of(cls, spec: ModelSpec, block: Block, kv_bytes_per_token: int = 0) -> "BlockCost":
        """Return the declaration of a block.

        Args:
            kv_bytes_per_token: of one layer's cache; not needed for blocks without one.
        """
        matrices = [tensor for tensor in block.tensors.values() if is_multiplied(tensor.role)]
        is_lookup, is_head = block.kind is BlockKind.EMBEDDING, block.kind is BlockKind.HEAD
        state = None if block.mixer is None else block.mixer.kv_state
        overhead = Overhead.PASS if is_head else Overhead.NONE
        return cls(
            weight_bytes=0 if is_head and spec.tied_head else sum(map(tensor_bytes, block.tensors.values())),
            products=() if is_lookup else tuple(map(tensor_product, matrices)),
            attention=None if state is None else AttentionCost(state, kv_bytes_per_token),
            neurons=NeuronRows.of(block),
            overhead=Overhead.HALF_LAYER if block.layer is not None else overhead,
        )

    @property
    def product_bytes(self) -> int:
        """Bytes of the matrices that every token reads whole."""
        return sum(product.n_bytes for product in self.products)

    @property
    def kv_bytes_per_token(self) -> int:
        """State that the block keeps of each token."""
        return 0 if self.attention is None else self.attention.kv_bytes_per_token

    def work(
        self,
        name: str,
        m: int,
        context_tokens: int = 0,
        shares: NeuronShares = ALL_NEURONS,
        disk_bytes: int = 0,
    ) -> Work:
        """Return the work of m tokens, the last of a sequence of context_tokens.

        Args:
            shares: of a sparse FFN's neurons, per token.
            disk_bytes: read from the disk meanwhile.
        """
        return Work(
            name,
            m,
            self.products,
            self.attention,
            self.overhead,
            disk_bytes,
            neurons=self.neurons,
            shares=shares,
            context_tokens=context_tokens,
        )
