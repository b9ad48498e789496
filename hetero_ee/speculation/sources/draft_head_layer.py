"""A draft head that runs on any executor and device.

EAGLE-1 (arXiv 2401.15077): e is the newest token's embedding, and h is the final normed state that led to the token. x
= fc [e; h] passes one Llama layer without input norm: x += attention(x), then x += ffn(norm(x)). The result estimates
the next state h. EAGLE-3: see eagle3.py; its verified states are stored after fc. MTP: see models/draft_head.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hetero_ee.costs.product import tensor_product
from hetero_ee.costs.work import Work
from hetero_ee.kv.batch import Batch
from hetero_ee.models.blocks import Block
from hetero_ee.models.draft_head import (
    EAGLE_1,
    EMBEDDING_NORM,
    FC,
    FC_NORM,
    HEAD_NORM,
    HIDDEN_NORM,
    NORM_ALL,
    NORM_EACH,
    Dialect,
    fc_block,
    layer_blocks,
)
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.devices.device import Event, T
from hetero_ee.runtime.devices.machine import BESIDE_KV_TYPE, BESIDE_ROWS, Machine
from hetero_ee.runtime.executors.executor import BlockExecutor
from hetero_ee.runtime.work import BlockWorks
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.weight import Weight

EMBEDDING = "embedding.tokens"  # a matrix in addition to those of the head's blocks


@dataclass(frozen=True, slots=True, eq=False)
class DraftHead:
    """Weights of a head as in its file: fp32 matrices under the names of layer_blocks(spec).

    FC is (d, 2d), optionally with a bias. EMBEDDING (vocab, d) exists if it differs from the model's, and HEAD_ROWS (k,
    d) if the head has its own logits.
    """

    spec: ModelSpec  # spec of the head's layer
    weights: ModelWeights
    draft_token_ids: Tensor | None = None  # (k,) ascending int64, the tokens it drafts; None for all
    dialect: Dialect = EAGLE_1


class DraftHeadLayer:
    """Computes a draft head on the device that has the head's KV cache.

    A token's bits depend only on that token and its sequence.

    Args:
        executor: runs fc_block and layer_blocks on that device.
        embedding: the head's own embedding, None to use the model's.
    """

    def __init__(
        self,
        executor: BlockExecutor,
        spec: ModelSpec,
        embedding: Weight | None,
        machine: Machine,
        *,
        on_gpu: bool,
        dialect: Dialect = EAGLE_1,
    ) -> None:
        self.cache, self._executor, self._dialect = executor.cache, executor, dialect
        self._spec, self._blocks, self._embedding = spec, layer_blocks(spec, dialect), embedding
        self._machine, self._on_gpu = machine, on_gpu
        self._works = DraftHeadWorks(spec, dialect)

    def guess(self, embedded: Tensor, states: Tensor, batch: Batch) -> Tensor:
        """Return the next states (m, d), fp32 on the head's device, from embeddings and last states, both (m, d)."""
        self.cache.admit(batch)
        here, ready = self._moved("verified states", states)
        entered, entered_ready = self._moved("draft embedding", embedded)

        def compute() -> Tensor:
            enter = self._attended if self._dialect.captured else self._joined
            found = self._executor.forward(*enter(entered, here, batch))
            return self._marked(self._executor.normed(found, HEAD_NORM) if self._dialect.norm_output else found)

        return self._run(self._works.guess(batch), compute, (*ready, *entered_ready))

    def _joined(self, embedded: Tensor, states: Tensor, batch: Batch) -> tuple[Tensor, Batch, list[Block]]:
        """Return the input of the blocks of EAGLE-1 and MTP: fc of the embeddings and the states."""
        executor = self._executor
        if self._dialect.has_norms:
            embedded, states = executor.normed(embedded, EMBEDDING_NORM), executor.normed(states, HIDDEN_NORM)
        return executor.linear(torch.cat([embedded, states], 1), FC), batch, self._blocks

    def _attended(self, embedded: Tensor, states: Tensor, batch: Batch) -> tuple[Tensor, Batch, list[Block]]:
        """Run the attention of EAGLE-3 and return the input of the remaining block."""
        executor, (attention, ffn) = self._executor, self._blocks
        normed = executor.normed(states, HIDDEN_NORM)
        x = torch.cat([executor.normed(embedded, EMBEDDING_NORM), normed], 1)
        mixed = executor.mix(x, batch, attention)
        return (normed if self._dialect.norm_before_residual else states) + mixed, batch, [ffn]

    def normed(self, state: Tensor) -> Tensor:
        """Return the normed state, from which logits are computed, of a state (1, d) of `guess`."""
        if self._dialect.norm_output or not self._dialect.has_norms:
            return state
        return self.on_device(lambda: self._marked(self._executor.normed(state, HEAD_NORM)))

    def keep(self, normed: Tensor, captured: Sequence[Tensor], put: Callable[[int, Tensor], None]) -> None:
        """Call `put` with states of verified tokens, (m, d) on the head's device, and the number of their first row.

        The states are the final normed states, or fc of the captured ones for EAGLE-3.

        Raises: ValueError: if captured states are missing.
        """
        n_seen = len(self._dialect.captured)
        if not n_seen:
            here, ready = self._moved("verified states", normed)
            self._run([], lambda: put(0, here), ready)
            return
        if len(captured) != n_seen:
            raise ValueError(f"{len(captured)} states were captured for a head that sees {n_seen}.")
        for first in range(0, len(normed), BESIDE_ROWS):
            some = [each[first : first + BESIDE_ROWS] for each in captured]
            parts, ready = self._gathered(some)
            compute = partial(self._put_fused, parts, first, put)
            self._run(self._works.fuse(len(parts[0])), compute, ready)

    def _put_fused(self, parts: Sequence[Tensor], first: int, put: Callable[[int, Tensor], None]) -> None:
        """Call `put` with fc of the captured states, each (m, d)."""
        executor, fc_norm = self._executor, self._dialect.fc_norm
        if fc_norm == NORM_EACH:
            parts = [executor.normed(part, f"{FC_NORM}.{number}") for number, part in enumerate(parts)]
        x = torch.cat(list(parts), 1)
        x = executor.normed(x, FC_NORM) if fc_norm == NORM_ALL else x
        put(first, self._marked(executor.linear(x, FC)))

    def _gathered(self, states: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Event, ...]]:
        """Move states (m, d) to the head's device. Those of the other device are transferred together."""
        copier, found = self._machine.copier, list(states)
        far = [number for number, each in enumerate(states) if copier.is_on_gpu(each) != self._on_gpu]
        if not far:
            return [self._moved("captured states", each)[0] for each in states], ()
        source = self._machine.device(on_gpu=not self._on_gpu)
        together = source.run([], lambda: torch.cat([states[number] for number in far], 1))[0]
        here, ready = self._moved("captured states", together)
        for number, part in zip(far, torch.split(here, self._spec.hidden_size, 1), strict=True):
            found[number] = part
        return found, ready

    def _marked(self, x: Tensor) -> Tensor:
        """Return x as a tensor of the device that has computed it."""
        return self._machine.copier.to_gpu(x) if self._on_gpu else x

    def on_device(self, compute: Callable[[], Tensor]) -> Tensor:
        """Run `compute` on the head's device. Raises: DeviceMemoryError: if the result doesn't fit."""
        return self._run([], compute)

    def embed(self, token_ids: list[int]) -> Tensor | None:
        """Return embeddings (m, d) from the head's own embedding on the CPU, or None if the head has none."""
        return None if self._embedding is None else self._embedding.rows(torch.tensor(token_ids))

    def warm_up(self, embedded: Tensor) -> None:
        """Compute one token from its embedding (1, d), so that a lack of memory shows before the first request."""
        sequence = self.cache.open_new()
        try:
            row, _ = self._moved("draft embedding", embedded)
            self.guess(row, row, Batch.of_sequence(sequence, 0, [0]))
        finally:
            self.cache.close(sequence)

    def _moved(self, name: str, x: Tensor) -> tuple[Tensor, tuple[Event, ...]]:
        return self._machine.moved(name, x, to_gpu=self._on_gpu)

    @torch.inference_mode()
    def _run(self, works: Sequence[Work], compute: Callable[[], T], after: Sequence[Event] = ()) -> T:
        return self._machine.device(on_gpu=self._on_gpu).run(works, compute, after)[0]


class DraftHeadWorks:
    """Descriptions of a draft head's work, for the device that runs or emulates it."""

    def __init__(self, spec: ModelSpec, dialect: Dialect) -> None:
        self._blocks, self._fuses = layer_blocks(spec, dialect), bool(dialect.captured)
        self._works = BlockWorks(spec, self._blocks, BESIDE_KV_TYPE)
        self._fc = tensor_product(fc_block(spec, dialect).tensors[FC])

    def guess(self, batch: Batch) -> list[Work]:
        """Return the work of one guess for each token: the layer and, unless it is EAGLE-3's, fc."""
        attention, ffn = self._works.through(self._blocks, batch)
        fc = () if self._fuses else (self._fc,)
        return [
            replace(attention, name="draft_head.attention", products=(*fc, *attention.products)),
            replace(ffn, name="draft_head.ffn"),
        ]

    def fuse(self, m: int) -> list[Work]:
        """Return the work of EAGLE-3's fc for m verified tokens."""
        return [Work("draft_head.fc", m, (self._fc,))]
