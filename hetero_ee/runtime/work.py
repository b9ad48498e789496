"""Describes the work of each step, from which emulated machines derive times and all machines count bytes."""

from collections.abc import Iterable, Sequence

from hetero_ee.costs.block_cost import BlockCost
from hetero_ee.costs.head_cost import HeadCost
from hetero_ee.costs.neurons import NeuronShares
from hetero_ee.costs.product import VOCABULARY_LAYOUT, Product
from hetero_ee.costs.work import Work, units_of
from hetero_ee.kv.batch import Batch
from hetero_ee.models.blocks import Block
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.placement import Placement
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.weights.weight import Weight


class BlockWorks:
    """Describes the work of batches in a model's blocks."""

    def __init__(self, spec: ModelSpec, blocks: Iterable[Block], kv_type: str) -> None:
        self._spec = spec
        self._costs = {block.name: BlockCost.of(spec, block, kv_type) for block in blocks}

    def through(self, blocks: Iterable[Block], batch: Batch, *, from_disk: bool = False) -> list[Work]:
        """Return the work of the batch in each of these blocks.

        Args:
            from_disk: the weights are read from the disk in every pass.
        """
        m, context_tokens = len(batch), max(batch.positions) + 1
        shares = NeuronShares.of(self._spec, is_prompt=batch.is_prompt)
        costs = [(block.name, self._costs[block.name]) for block in blocks]
        works = [cost.work(name, m, context_tokens, shares) for name, cost in costs]
        return [work.from_disk() for work in works] if from_disk else works

    def split(self, block: Block, batch: Batch, place: Placement) -> tuple[Work, Work, Work]:
        """Return three works of a split block: the GPU's first step, its first units, and the CPU's units."""
        (work,) = self.through([block], batch)
        return work.split(n_hot(block, place), self._spec.hot_curve, reads_disk=place.reads_disk)

    def head(self, block: Block, end: DraftEnd | None = None) -> HeadCost:
        """Return the cost of the head `block`, including the exit map, vocabulary and judge of a DraftEnd."""
        cost = self._costs[block.name]
        if end is None:
            return HeadCost(cost)
        matrices = () if end.state_map is None else (end.state_map.down, end.state_map.up)
        return HeadCost(
            cost,
            tuple(_product(weight) for weight in matrices if weight is not None),
            None if end.vocabulary is None else _product(end.vocabulary.rows),
            None if end.judge is None else Product(VOCABULARY_LAYOUT, *end.judge.network[0].shape),
        )


def n_hot(block: Block, place: Placement) -> int:
    """Return how many neurons or experts of a split block are on the GPU."""
    units = units_of(block)
    assert units is not None, "has no units that two devices could share"
    return units.first_units(place.n_sections)


def _product(weight: Weight) -> Product:
    return Product(VOCABULARY_LAYOUT, *weight.shape)


def joined_name(works: Sequence[Work]) -> str:
    """Return one name for several works that run together."""
    if not works:
        return "other work"
    return works[0].name if len(works) == 1 else f"{works[0].name} to {works[-1].name}"
