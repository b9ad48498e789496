"""Costs of a draft head on the CPU or the GPU: seconds per draft and per prompt token, and bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from hetero_ee.costs.block_cost import BlockCost
from hetero_ee.costs.head_cost import HeadCost
from hetero_ee.costs.product import FLOAT_BYTES, tensor_bytes
from hetero_ee.costs.work import Work
from hetero_ee.kv.batch import Batch
from hetero_ee.layers.tensors import TensorRole, TensorSpec
from hetero_ee.models.blocks import decoder_blocks
from hetero_ee.models.draft_head import fc_block, layer_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.statistics import DraftRates, PromptReading
from hetero_ee.planning.times.memory import WorkingSizes, rounded
from hetero_ee.runtime.devices.machine import BESIDE_KV_TYPE, BESIDE_ROWS
from hetero_ee.speculation.sources.draft_head import PIECE_ROWS
from hetero_ee.speculation.sources.draft_head_file import DraftHeadFacts
from hetero_ee.speculation.sources.draft_head_layer import EMBEDDING, DraftHeadWorks
from hetero_ee_profiles.hardware import HardwareProfile

# If a head's best draft is wrong, the chances of its next ones, by the first draft's acceptance. Measured, greedy: 146
# wrong drafts of SmolLM2's head and 299 of the demo model's, 2026-11-28.
OTHERS = {0.3: (0.14, 0.11, 0.06, 0.03, 0.05, 0.01, 0.01), 0.82: (0.6, 0.2, 0.07, 0.04, 0.02, 0.01, 0.0)}
TYPICAL_CONTEXT_TOKENS = 512  # at which a draft's seconds are reckoned


@dataclass(frozen=True, slots=True)
class HeadCosts:
    """Costs of one draft head, for a model and a number of CPU threads."""

    facts: DraftHeadFacts
    spec: ModelSpec
    profile: HardwareProfile
    threads: int

    @property
    def works(self) -> DraftHeadWorks:
        return DraftHeadWorks(self.facts.spec, self.facts.dialect)

    def rates(self, source: str) -> DraftRates:
        """Return the planner's rates for the head on the CPU, and on the GPU if there is one."""
        by_gpu = None if self.profile.gpu is None else self._rates(source, on_gpu=True)
        return self._rates(source, on_gpu=False, by_gpu=by_gpu)

    def draft_s(self, head_on_gpu: bool, embedding_on_gpu: bool, n_nodes: int = 0, *, on_gpu: bool) -> float:
        """Return the seconds of one draft: the head's layer, the choice by the model's lm_head, and three transfers at
        most.

        Args:
            n_nodes: tokens of a tree's level after which several drafts each are made, from logits on the CPU; 0 for
                one draft of a chain.
        """
        m, link = max(1, n_nodes), self.profile.link
        batch = Batch.of_sequence(0, TYPICAL_CONTEXT_TOKENS, [0] * m)
        spec = replace(self.spec, vocab_size=self.facts.n_draft_tokens)
        head = HeadCost(BlockCost.of(spec, decoder_blocks(spec)[-1]))
        choice = head.draft(1) if head_on_gpu and not n_nodes else head.logits(m)
        embedded_on_gpu = embedding_on_gpu and not self.facts.has_embedding
        n_transfers = (embedded_on_gpu != on_gpu) + (on_gpu != head_on_gpu) + head_on_gpu
        seconds = self._works_s(self.works.guess(batch), on_gpu=on_gpu) + self._works_s(choice, on_gpu=head_on_gpu)
        if link is None:
            return seconds
        logits_bytes = FLOAT_BYTES * n_nodes * self.facts.n_draft_tokens if head_on_gpu else 0
        return seconds + n_transfers * link.transfer.value + logits_bytes / link.to_cpu_bytes_per_s.value

    def reading_s(self, m: int, context_tokens: int, *, on_gpu: bool) -> float:
        """Return the seconds that the head's layer needs for m tokens, the last of a prompt of context_tokens."""
        works = self.works
        seconds = sum(self._works_s(works.guess(each), on_gpu=on_gpu) for each in prompt_pieces(m, context_tokens))
        return seconds + (self._works_s(works.fuse(m), on_gpu=on_gpu) if self.facts.dialect.captured else 0.0)

    def verified_s(self, placements: Sequence[Placement], m: int, *, on_gpu: bool) -> float:
        """Return the seconds from m verified tokens to the next draft, excluding the draft itself. For EAGLE-3, the
        states captured on the other device are transferred together, then fc runs."""
        spec, captured = self.facts.spec, self.facts.dialect.captured
        if not captured:
            return 0.0
        # The state before a layer is on the device of the block before it; parts are the embedding and two per layer.
        n_far = sum((placements[2 * layer].on_gpu) != on_gpu for layer in captured)
        seconds, link = self._works_s(self.works.fuse(m), on_gpu=on_gpu), self.profile.link
        if n_far and link is not None:
            more_bytes = (n_far * m - 1) * FLOAT_BYTES * spec.hidden_size
            seconds += link.transfer.value + more_bytes / link.to_cpu_bytes_per_s.value
        return seconds

    def memory_bytes(self, context_tokens: int, n_sequences: int = 1, *, on_gpu: bool) -> int:
        """Return the bytes of weights, keys and values, verified states and, on a GPU, the layer's buffers. The head's
        own embedding stays on the CPU, since only single rows of it are read."""
        spec, dialect = self.facts.spec, self.facts.dialect
        blocks = (fc_block(spec, dialect), *layer_blocks(spec, dialect))
        tensors = [tensor for block in blocks for tensor in block.tensors.values()]
        if self.facts.has_embedding and not on_gpu:
            shape = (spec.vocab_size, spec.hidden_size)
            tensors.append(TensorSpec(EMBEDDING, TensorRole.VOCABULARY, shape))
        n_states = -(-context_tokens // PIECE_ROWS) * PIECE_ROWS
        parts = [self._rows_bytes, *map(tensor_bytes, tensors)]
        states = [block.mixer.state for block in blocks if block.mixer is not None]
        parts += [each.n_bytes(context_tokens, BESIDE_KV_TYPE, n_sequences) for each in states if each is not None]
        parts += [FLOAT_BYTES * spec.hidden_size * n_states]
        if not on_gpu:
            return sum(parts)
        room = WorkingSizes.of(spec).gpu_terms(context_tokens, BESIDE_ROWS)
        return sum(map(rounded, parts)) + sum(term.n_bytes for term in room)

    @property
    def _rows_bytes(self) -> int:
        """Return the bytes of the head's own rows of the lm_head, or of those for its trimmed vocabulary. They are on
        the device of the model's lm_head."""
        if self.facts.n_draft_tokens == self.spec.vocab_size and not self.facts.has_rows:
            return 0
        shape = (self.facts.n_draft_tokens, self.spec.hidden_size)
        return tensor_bytes(TensorSpec("rows", TensorRole.VOCABULARY, shape))

    def _rates(self, source: str, *, on_gpu: bool, by_gpu: DraftRates | None = None) -> DraftRates:
        reading = PromptReading(cache(partial(self.reading_s, on_gpu=on_gpu)), on_gpu, self.facts.has_embedding)
        memory = cache(partial(self.memory_bytes, on_gpu=on_gpu))
        draft_s = cache(partial(self.draft_s, on_gpu=on_gpu))
        rows_bytes = 0 if on_gpu else rounded(self._rows_bytes)
        alone_s = draft_s(False, False)
        verified_s = partial(self.verified_s, on_gpu=on_gpu)
        placed = source, self.facts.acceptance, alone_s, reading, memory, rows_bytes, by_gpu, draft_s, verified_s
        return DraftRates(*placed, others=_others(self.facts.acceptance[0]), placed_level_s=draft_s)

    def _works_s(self, works: Sequence[Work], *, on_gpu: bool) -> float:
        return works_s(works, self.facts.spec, self.profile, self.threads, on_gpu=on_gpu)


def _others(acceptance: float) -> tuple[float, ...]:
    """Return the chances of a head's next drafts if its best one is wrong, interpolated between measured heads."""
    columns = zip(*OTHERS.values(), strict=True)
    return tuple(float(np.interp(acceptance, list(OTHERS), column)) for column in columns)


def prompt_pieces(m: int, context_tokens: int) -> Iterator[Batch]:
    """Yield the passes in which a draft source reads m tokens, the last of a prompt of context_tokens."""
    for first in range(context_tokens - m, context_tokens, BESIDE_ROWS):
        yield Batch.of_sequence(0, first, [0] * min(BESIDE_ROWS, context_tokens - first))


def works_s(works: Sequence[Work], spec: ModelSpec, profile: HardwareProfile, threads: int, *, on_gpu: bool) -> float:
    """Return the seconds that the profile's GPU, if on_gpu, or its CPU needs for these works."""
    times = profile.gpu if on_gpu and profile.gpu is not None else profile.cpu_with(threads)
    return sum(work.seconds(times, profile.disk_read_bytes_per_s.value, spec) for work in works)
