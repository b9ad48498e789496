"""A draft head (EAGLE-1, arXiv 2401.15077) as a list of blocks: what it computes, on any executor and device.

From the newest token's embedding e and the final normed state h that led to it, x = fc [e; h] passes one Llama layer
without input norm: x += attention(x), then x += ffn(norm(x)). What comes out is a guess of the next such state h.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetero_ee.models.blocks import Block, BlockKind, TensorRole, TensorSpec, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.parts import kv_bytes_per_token
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.devices.device import Event, T
from hetero_ee.runtime.devices.machine import BESIDE_KV_TYPE, Machine
from hetero_ee.runtime.executors.executor import BlockExecutor
from hetero_ee.runtime.work import Work, block_works
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.weight import Weight

FC, EMBEDDING = "fc", "embedding.tokens"  # matrices beside those of the layer's blocks


@dataclass(frozen=True, slots=True, eq=False)
class DraftHead:
    """A head as its file has it: fp32 matrices under the names of layer_blocks(spec), FC (d, 2d) with a bias or none,
    and EMBEDDING (vocab, d) where it is not the model's."""

    spec: ModelSpec  # of its one layer
    weights: ModelWeights
    draft_token_ids: Tensor | None = None  # (k,) ascending int64, the tokens it drafts; None for all


def layer_blocks(spec: ModelSpec) -> list[Block]:
    """The attention, whose input is not normed, and the FFN."""
    attention, ffn = (block for block in decoder_blocks(spec) if block.layer is not None)
    tensors = {short: tensor for short, tensor in attention.tensors.items() if short != "norm"}
    return [replace(attention, tensors=tensors, has_norm=False), ffn]


def fc_block(spec: ModelSpec) -> Block:
    """FC as a block of no layer, for those who go by blocks."""
    size = spec.hidden_size
    tensors = {
        FC: TensorSpec(FC, TensorRole.MATRIX, (size, 2 * size)),
        f"{FC}_bias": TensorSpec(f"{FC}_bias", TensorRole.VECTOR, (size,)),
    }
    return Block(FC, BlockKind.FFN, None, tensors, has_norm=False)


class DraftHeadLayer:
    """Computes a head on the CPU or the GPU of a machine, where its keys and values lie too.

    executor: of fc_block and layer_blocks on that device. spec: of its one layer. embedding: its own, None for the
    model's. A token's bits depend on that token and its sequence alone.
    """

    def __init__(
        self, executor: BlockExecutor, spec: ModelSpec, embedding: Weight | None, machine: Machine, *, on_gpu: bool
    ) -> None:
        self.cache, self._executor = executor.cache, executor
        self._spec, self._blocks, self._embedding = spec, layer_blocks(spec), embedding
        self._machine, self._on_gpu = machine, on_gpu

    def guess(self, embedded: Tensor, states: Tensor, batch: Batch) -> Tensor:
        """The next states, (m, d) fp32 on its device: of the tokens' embeddings and the states before them."""
        self.cache.admit(batch)
        here, ready = self._moved("verified states", states)
        entered, entered_ready = self._moved("draft embedding", embedded)

        def compute() -> Tensor:
            x = self._executor.linear(torch.cat([entered, here], 1), FC)
            found = self._executor.forward(x, batch, self._blocks)
            return self._machine.copier.to_gpu(found) if self._on_gpu else found

        return self._run(draft_head_works(self._spec, batch), compute, (*ready, *entered_ready))

    def keep(self, states: Tensor, put: Callable[[Tensor], None]) -> None:
        """Calls put with states (m, d) on its device, in the order of what is computed there."""
        here, ready = self._moved("verified states", states)
        self._run([], lambda: put(here), ready)

    def on_device(self, compute: Callable[[], Tensor]) -> Tensor:
        """compute() on its device. Raises DeviceMemoryError where there is no room for what comes out."""
        return self._run([], compute)

    def embed(self, token_ids: list[int]) -> Tensor | None:
        """(m, d) by the head's own embedding, which stays on the CPU; None where it has none."""
        return None if self._embedding is None else self._embedding.rows(torch.tensor(token_ids))

    def warm_up(self, embedded: Tensor) -> None:
        """Computes once what a token, embedded as (1, d), takes, so that memory runs out now or not at all."""
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


def draft_head_works(spec: ModelSpec, batch: Batch) -> list[Work]:
    """What one guess of each token takes: fc and the layer of this spec, in 4 bits."""
    kv_bytes = kv_bytes_per_token(spec, BESIDE_KV_TYPE)
    attention, ffn = block_works(spec, layer_blocks(spec), batch, kv_bytes_per_token=kv_bytes)
    fc = "int4", spec.hidden_size, 2 * spec.hidden_size
    return [
        replace(attention, name="draft_head.attention", products=(fc, *attention.products)),
        replace(ffn, name="draft_head.ffn"),
    ]
