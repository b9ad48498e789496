"""Compute the costs of turning hidden states into logits, drafts and judgements, at the model's end or at an exit."""

from dataclasses import dataclass, replace

from hetero_ee.costs.block_cost import BlockCost
from hetero_ee.costs.product import FLOAT_BYTES, VOCABULARY_LAYOUT, Product
from hetero_ee.costs.work import Overhead, Work

EXIT_MAP, DRAFT_VOCABULARY, CHOICE, JUDGE = "exit_map", "draft_vocabulary", "draft_choice", "exit_predictor"
CANDIDATES = "candidates"
CANDIDATE_ROWS = 8  # rows of the head that one candidate costs: half of a line of 16 rows is read at once


@dataclass(frozen=True, slots=True)
class HeadCost:
    """Costs of the model's head and of the products before and after it, at an exit or in a draft head."""

    head: BlockCost
    map_products: tuple[Product, ...] = ()  # products of an exit map
    vocabulary: Product | None = None  # a draft head's own vocabulary matrix, in place of the model's head
    judge: Product | None = None  # the first matrix of the network that judges a token at an exit

    def logits(self, m: int) -> list[Work]:
        """Return the work of m hidden states in the exit map and the head."""
        works, head = [], self.head.work("head", m)
        if self.map_products:
            works.append(Work(EXIT_MAP, m, self.map_products))
        if self.vocabulary is not None:
            head = replace(head, name=DRAFT_VOCABULARY, products=(self.vocabulary,))
        return [*works, head]

    def draft(self, m: int) -> list[Work]:
        """Return the work of `logits` on a GPU, with choosing and judging tokens.

        The choice reads the logits once, like a product with four columns. Norm and other small kernels cost half a
        layer, as the host has no other work.
        """
        works = self.logits(m)
        works[-1] = replace(works[-1], overhead=Overhead.HALF_LAYER)
        works.append(Work(CHOICE, m, (Product(VOCABULARY_LAYOUT, works[-1].products[-1].n_rows, FLOAT_BYTES),)))
        return works if self.judge is None else [*works, Work(JUDGE, m, (self.judge,))]

    def candidates(self, m: int, n_candidates: int) -> list[Work]:
        """Return the work of m hidden states in the exit map and, for each, in n_candidates rows of the head."""
        *maps, head = self.logits(m)
        whole = head.products[-1]
        sliced = whole._replace(n_rows=min(whole.n_rows, CANDIDATE_ROWS * m * n_candidates))
        return [*maps, replace(head, name=CANDIDATES, products=(sliced,), overhead=Overhead.HALF_LAYER)]
