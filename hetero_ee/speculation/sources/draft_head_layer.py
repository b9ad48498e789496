"""A draft head (EAGLE-1, arXiv 2401.15077) as a list of blocks: what it computes, on any executor and device.

From the newest token's embedding e and the final normed state h that led to it, x = fc [e; h] passes one Llama layer
without input norm: x += attention(x), then x += ffn(norm(x)). What comes out is a guess of the next such state h.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hetero_ee.models.blocks import Block, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.parts import FLOAT_BYTES
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.devices.device import CPU, GPU, Device, Event
from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.runtime.executors.executor import HostExecutor
from hetero_ee.runtime.kv.cpu import CpuKvCache
from hetero_ee.runtime.work import Overhead, Work, block_works
from hetero_ee.weights.model_weights import ModelWeights

FC, EMBEDDING, LM_HEAD = "fc", "embedding.tokens", "head.tokens"  # matrices beside those of the layer's blocks


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


class DraftHeadLayer(Protocol):
    """Computes a head. A token's bits depend on that token and its sequence alone."""

    @property
    def cache(self) -> CpuKvCache:
        """Keys and values of its one layer."""
        ...

    def guess(self, embedded: Tensor, states: Tensor, batch: Batch) -> Tensor:
        """The next states, (m, d) fp32: of the tokens' embeddings and the states before them, (m, d) each."""
        ...

    def embed(self, token_ids: list[int]) -> Tensor | None:
        """(m, d) by the head's own embedding; None where it has none."""
        ...

    def logits(self, states: Tensor) -> Tensor | None:
        """Of the draft vocabulary, (m, k), where the head has one."""
        ...


class ExecutorDraftHead:
    """A DraftHeadLayer. executor: of the head's spec and weights; LM_HEAD: rows of the model's for a vocabulary."""

    def __init__(self, executor: HostExecutor) -> None:
        self.cache, self._executor, self._blocks = executor.cache, executor, layer_blocks(executor.spec)

    @torch.inference_mode()
    def guess(self, embedded: Tensor, states: Tensor, batch: Batch) -> Tensor:
        """See DraftHeadLayer.guess."""
        self.cache.admit(batch)
        x = self._executor.linear(torch.cat([embedded, states], 1), FC)
        return self._executor.forward(x, batch, self._blocks)

    def embed(self, token_ids: list[int]) -> Tensor | None:
        """See DraftHeadLayer.embed."""
        embedding = self._executor.weights.matrices.get(EMBEDDING)
        return None if embedding is None else embedding.rows(torch.tensor(token_ids))

    def logits(self, states: Tensor) -> Tensor | None:
        """See DraftHeadLayer.logits."""
        return self._executor.linear(states, LM_HEAD) if LM_HEAD in self._executor.weights.matrices else None


def draft_head_works(spec: ModelSpec, batch: Batch) -> list[Work]:
    """What one guess of each token takes: fc and the layer of this spec, in 4 bits, keys and values in fp32."""
    attention, ffn = block_works(spec, layer_blocks(spec), batch, kv_bytes_per_token=2 * spec.kv_size * FLOAT_BYTES)
    fc = "int4", spec.hidden_size, 2 * spec.hidden_size
    return [
        replace(attention, name="draft_head.attention", products=(fc, *attention.products)),
        replace(ffn, name="draft_head.ffn"),
    ]


def vocabulary_work(m: int, n_tokens: int, hidden_size: int) -> Work:
    """What the logits of m guesses take over so many tokens."""
    return Work("draft_head.vocabulary", m, (("int8", n_tokens, hidden_size),), None, Overhead.PASS)


class PlacedDraftHead:
    """`layer`, whose work the machine's GPU or CPU is charged. spec: its shape. Guesses lie there, logits on the CPU.

    machine: the one that runs the model now; on_gpu: on its GPU, as long as it has one.
    """

    def __init__(self, layer: DraftHeadLayer, spec: ModelSpec, machine: Callable[[], Machine], *, on_gpu: bool) -> None:
        self._layer, self._spec, self._machine_now, self._wants_gpu = layer, spec, machine, on_gpu
        self.cache, self.embed = layer.cache, layer.embed

    @property
    def _machine(self) -> Machine:
        return self._machine_now()

    @property
    def _on_gpu(self) -> bool:
        return self._wants_gpu and self._machine.gpu is not None

    def guess(self, embedded: Tensor, states: Tensor, batch: Batch) -> Tensor:
        """See DraftHeadLayer.guess. On a GPU embeddings are transferred first; verified states are there already."""
        copier, works = self._machine.copier, draft_head_works(self._spec, batch)
        inputs = (copier.to_cpu(embedded), copier.to_cpu(states))
        if not self._on_gpu:
            return self._machine.cpu.run(works, lambda: self._layer.guess(*inputs, batch))[0]
        transferred = self._transferred("draft embedding", embedded, GPU, ())
        return self._gpu.run(works, lambda: copier.to_gpu(self._layer.guess(*inputs, batch)), (transferred,))[0]

    def logits(self, states: Tensor) -> Tensor | None:
        """See DraftHeadLayer.logits."""
        found = self._layer.logits(self._machine.copier.to_cpu(states))
        if found is None:
            return None
        m, n_tokens = found.shape
        works = [vocabulary_work(m, n_tokens, self._spec.hidden_size)]
        if not self._on_gpu:
            return self._machine.cpu.run(works, lambda: found)[0]
        _, computed = self._gpu.run(works, lambda: None)
        self._transferred("draft logits", found, CPU, (computed,)).wait()
        return found

    @property
    def _gpu(self) -> Device:
        assert self._machine.gpu is not None, "looked at before"
        return self._machine.gpu

    def _transferred(self, name: str, x: Tensor, to: str, after: Sequence[Event]) -> Event:
        """The event of x (m, columns) transferred to that device."""
        assert self._machine.link is not None, "looked at before"
        n_rows, n_columns = x.shape
        return self._machine.link.transfer(name, n_rows, n_columns * FLOAT_BYTES, to, lambda: None, after)[1]
