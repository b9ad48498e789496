"""Random trees of tokens, for checks of whatever computes them."""

import random
from dataclasses import dataclass

import torch

from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.executors.executor import Executor
from tests.executor_support import contents

PROMPT = [(7 * i * i + 3) % 131 for i in range(70)]


@dataclass(frozen=True)
class Tree:
    """Nodes in depth-first order; the parent of node 0 is -1, each other one's comes before it."""

    token_ids: list[int]
    parents: list[int]

    @classmethod
    def drawn(cls, draw: random.Random, n_nodes: int, vocab_size: int) -> "Tree":
        """Of any shape between a chain and a star; siblings may be the same token."""
        parents, path, is_long = [-1], [0], draw.random()
        for node in range(1, n_nodes):
            keep = len(path) if draw.random() < is_long else draw.randint(1, len(path))
            path = [*path[:keep], node]
            parents.append(path[-2])
        return cls([draw.randrange(vocab_size) for _ in parents], parents)

    def path(self, node: int) -> list[int]:
        """The nodes from the first one to this."""
        above = self.parents[node]
        return [*(self.path(above) if above >= 0 else []), node]

    def tokens(self, node: int) -> list[int]:
        """Those on its path."""
        return [self.token_ids[each] for each in self.path(node)]

    @property
    def depths(self) -> list[int]:
        return [len(self.path(node)) - 1 for node in range(len(self.parents))]

    def batch(self, sequence: int, first_position: int) -> Batch:
        """As one pass after first_position tokens."""
        positions = tuple(first_position + depth for depth in self.depths)
        return Batch(tuple(self.token_ids), (sequence,) * len(positions), positions, is_tree=True)


def check_trees(executor: Executor, seed: int, n_trees: int) -> None:
    """Trees one after the other in a text that goes on with the path that each of them leaves."""
    draw, cache = random.Random(seed), executor.cache
    sequence, plain = cache.open_new(), cache.open_new()
    text = PROMPT[: draw.randint(1, len(PROMPT))]
    for number in (sequence, plain):
        executor.hidden(Batch.of_sequence(number, 0, text))
    for _ in range(n_trees):
        tree = Tree.drawn(draw, draw.randint(2, 32), executor.spec.vocab_size)
        if len(text) + max(tree.depths) >= cache.max_tokens:
            text = text[: draw.randint(1, len(PROMPT))]
            for number in (sequence, plain):
                cache.truncate(number, len(text))
        hidden = executor.hidden(tree.batch(sequence, len(text)))
        for node in {len(tree.parents) - 1, *draw.sample(range(len(tree.parents)), 2)}:
            cache.truncate(plain, len(text))
            alone = executor.hidden(Batch.of_sequence(plain, len(text), tree.tokens(node)))
            assert torch.equal(hidden[node], alone[-1])
        last = tree.tokens(len(tree.parents) - 1)
        kept = draw.randint(0, len(last))
        cache.truncate(plain, len(text))
        executor.hidden(Batch.of_sequence(plain, len(text), last))
        text = text + last[:kept]
        for number in (sequence, plain):
            cache.truncate(number, len(text))
        cache.check()
        for found, wanted in zip(contents(executor, sequence), contents(executor, plain), strict=True):
            assert torch.equal(found, wanted)
    for number in (sequence, plain):
        cache.close(number)
