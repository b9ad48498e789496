"""A model whose answers are scripted, behind the executor's interface: it counts what it is asked to compute."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hetero_ee.planning.times.overlap import Overlap
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.executors.executor import Observe
from hetero_ee.runtime.kv.cpu import CpuKvCache

N_LAYERS, VOCABULARY = 6, 32
Next = Callable[[int, int], int]  # token, its position -> the token that follows


@dataclass
class Pass:
    """One call of run: layers, and the rows' tokens, sequences and positions."""

    layers: range
    rows: Batch


@dataclass
class ScriptedModel:
    """A hidden state is (token, position, layers passed). full says what follows after all layers, exits before.

    spread: how far the chosen token's logit is above the others'. spoiled: positions whose full logits are NaN.
    overlap: as an executor has it.
    """

    full: Next
    exits: Next
    max_tokens: int = 200
    spread: float = 5.0
    spoiled: frozenset[int] = frozenset()
    prompt_chunk_tokens: int = 256
    progress: None = None
    overlap: Overlap | None = None
    passes: list[Pass] = field(default_factory=list)
    n_projected: int = 0
    n_sliced: int = 0

    def __post_init__(self) -> None:
        self.spec: Any = SimpleNamespace(n_layers=N_LAYERS, vocab_size=VOCABULARY)
        self.cache = CpuKvCache(N_LAYERS, 1, 1, self.max_tokens)

    def prompt(self, chunks: Iterable[Batch], observe: Observe | None = None) -> Tensor:
        for batch in chunks:
            hidden = self.hidden(batch)
            if observe is not None:
                observe(batch, self.final_norm(hidden))
        return self.to_logits(hidden[-1:])[0]

    def hidden(self, batch: Batch) -> Tensor:
        return self.run(batch, None, range(N_LAYERS))

    def logits(self, batch: Batch, wanted: Sequence[int]) -> Tensor:
        return self.to_logits(self.hidden(batch)[list(wanted)])

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor:
        self.passes.append(Pass(layers, batch))
        self.cache.admit(batch, layers)
        states = torch.tensor([batch.token_ids, batch.positions, [0] * len(batch)], dtype=torch.float32).T
        if hidden is not None:
            assert torch.equal(hidden[:, :2], states[:, :2])  # what waited is what is verified
            states = hidden.clone()
        assert bool((states[:, 2] == layers.start).all())
        states[:, 2] = layers.stop
        return states

    def on_cpu(self, hidden: Tensor) -> Tensor:
        return hidden

    def final_norm(self, hidden: Tensor) -> Tensor:
        return hidden

    def lm_head(self, normed: Tensor) -> Tensor:
        self.n_projected += len(normed)
        return torch.stack([self._logits(*(int(x) for x in row)) for row in normed])

    def partial_logits(self, normed: Tensor, token_ids: Tensor) -> Tensor:
        n_projected = self.n_projected
        logits = self.lm_head(normed).gather(1, token_ids)
        self.n_projected, self.n_sliced = n_projected, self.n_sliced + len(normed)
        return logits

    def to_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.final_norm(hidden))

    def _logits(self, token_id: int, position: int, n_layers: int) -> Tensor:
        is_full = n_layers == N_LAYERS
        logits = torch.linspace(0, 1, VOCABULARY)  # no two are the same
        logits[(self.full if is_full else self.exits)(token_id, position) % VOCABULARY] += self.spread
        return logits * float("nan") if is_full and position in self.spoiled else logits

    @property
    def later(self) -> list[Pass]:
        """Passes through the last layers, those through all of them left out."""
        return [one for one in self.passes if one.layers.stop == N_LAYERS and one.layers.start > 0]

    @property
    def earlier(self) -> list[Pass]:
        """Passes through the first layers alone."""
        return [one for one in self.passes if one.layers.stop < N_LAYERS]


def successor(token_id: int, position: int) -> int:
    """A text that counts."""
    return (token_id + 1) % VOCABULARY


def wrong_at(*positions: int) -> Next:
    """The same, but for what follows the tokens at these positions."""
    return lambda token_id, position: (token_id + (7 if position in positions else 1)) % VOCABULARY
