"""A model whose answers are scripted, behind the executor's interface: it counts what it is asked to compute."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Ending, Prompts
from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.times.overlap import Overlap
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.executors.executor import Observe
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from tests.draft_sources import ScriptedSource, following
from tests.drafted_generation import generate_exact

N_LAYERS, VOCABULARY, HIDDEN, EXIT_LAYER = 6, 32, 3, 2
PROMPT = [3, 4, 5]
COUNTING = [(6 + i) % 32 for i in range(40)]  # what successor says after PROMPT
Next = Callable[[int, int], int]  # token, its position -> the token that follows


@dataclass
class Pass:
    """One call of run."""

    layers: range
    batch: Batch
    is_prompt: bool = False


@dataclass
class Says:
    """A judge that is always as sure."""

    confidence: float
    network: Any = (torch.zeros(64, 12), torch.zeros(64), torch.zeros(64), torch.zeros(1))

    def of_row(self, logits: Tensor) -> float:
        return self.confidence


@dataclass
class ScriptedModel:
    """A hidden state is (token, position, layers passed)."""

    full: Next  # what follows after all layers
    exits: Next  # what follows by the exit layer's state
    max_tokens: int = 200
    spread: float = 5.0  # how far the chosen token's logit is above the others'
    spoiled: frozenset[int] = frozenset()  # positions whose full logits are NaN
    prompt_chunk_tokens: int = 256
    progress: None = None
    overlap: Overlap | None = None  # as an executor has it
    head_on_gpu: bool = False
    captured: tuple[Tensor, ...] = ()
    passes: list[Pass] = field(default_factory=list)
    n_logits: int = 0  # states that the lm_head was asked about

    def __post_init__(self) -> None:
        self.spec: Any = SimpleNamespace(n_layers=N_LAYERS, vocab_size=VOCABULARY)
        self.weights = SimpleNamespace(quantizer="none")
        self.cache = CpuKvCache(N_LAYERS, 1, 1, self.max_tokens, kind="fp32")

    def prompt(self, chunks: Iterable[Batch], observe: Observe | None = None) -> Tensor:
        for batch in chunks:
            hidden = self.hidden(batch)
            self.passes[-1].is_prompt = True
            if observe is not None:
                observe(batch, self.final_norm(hidden))
        return self.to_logits(hidden[-1:])[0]

    def make_room(self, ends: Mapping[int, int]) -> None:
        """It has all the room there is."""

    def keep_path(self, sequence: int, first: int, slots: Sequence[int]) -> None:
        self.cache.keep_path(sequence, first, slots)

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
        self.n_logits += len(normed)
        return torch.stack([self._logits(*(int(x) for x in state)) for state in normed])

    def draft_logits(self, hidden: Tensor, end: DraftEnd) -> Tensor:
        """By the end's map, any callable."""
        state_map: Any = end.state_map
        return self.lm_head(hidden if state_map is None else state_map(hidden))

    def to_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.final_norm(hidden))

    def _logits(self, token_id: int, position: int, n_layers: int) -> Tensor:
        is_full = n_layers == N_LAYERS
        logits = torch.linspace(0, 1, VOCABULARY)  # no two are the same
        logits[(self.full if is_full else self.exits)(token_id, position) % VOCABULARY] += self.spread
        return logits * float("nan") if is_full and position in self.spoiled else logits

    @property
    def verifications(self) -> list[Pass]:
        """Passes through the last layers, those of prompts left out."""
        return [one for one in self.passes if one.layers.stop == N_LAYERS and not one.is_prompt]

    @property
    def drafting_passes(self) -> list[Pass]:
        """Passes through the first layers alone."""
        return [one for one in self.passes if one.layers.stop < N_LAYERS]


def successor(token_id: int, position: int) -> int:
    """A text that counts."""
    return (token_id + 1) % VOCABULARY


def wrong_at(*positions: int) -> Next:
    """The same, but for what follows the tokens at these positions."""
    return lambda token_id, position: (token_id + (7 if position in positions else 1)) % VOCABULARY


KINDS = ("exits", "sequences")  # of drafters


def drafted(
    kind: str, drafts: Next = successor, draft_length: int = 4, **changes: Any
) -> tuple[ScriptedModel, Drafting]:
    """A model that counts, and drafting of this kind without end: what follows is said by `drafts`."""
    exits, sequences = (DraftEnd(), ()), (None, (ScriptedSource(following(drafts), HIDDEN),))
    exit_end, sources = exits if kind == "exits" else sequences
    options = {"rule": FixedThreshold(0.0), "exit_end": exit_end, "sources": sources} | changes
    exit_layer = 0 if options["exit_end"] is None else EXIT_LAYER
    return ScriptedModel(successor, drafts), Drafting(exit_layer, draft_length, **options)


def decoding(
    model: ScriptedModel,
    how: Drafting | None,
    prompts: Prompts,
    n_tokens: int | None = 12,
    counts: DraftCounts | None = None,
    eos: frozenset[int] = frozenset(),
    context_tokens: int = 200,
    **params: Any,
) -> Iterator[GeneratedToken]:
    """In exact mode, or at full depth where `how` is None; the text is the tokens' numbers."""
    sampling, ending = SamplingParams(max_new_tokens=n_tokens, **params), Ending(eos, context_tokens)
    arguments: Any = (model, prompts, sampling, ending, numbers, lambda: 0.0)
    return generate(*arguments) if how is None else generate_exact(*arguments, how, counts)


def numbers(token_ids: Sequence[int]) -> str:
    """A text of them."""
    return "".join(f"{token_id}," for token_id in token_ids)
