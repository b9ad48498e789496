"""A draft head as a list of blocks, which run on any executor and device.

EAGLE-1 (arXiv 2401.15077): e is the newest token's embedding, and h is the final normed state that led to the token. x
= fc [e; h] passes one Llama layer without input norm: x += attention(x), then x += ffn(norm(x)). The result estimates
the next state h. EAGLE-3: see eagle3.py; its verified states are stored after fc.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hetero_ee.costs.product import Product
from hetero_ee.costs.work import Work
from hetero_ee.kv.batch import Batch
from hetero_ee.layers.tensors import TensorRole, TensorSpec
from hetero_ee.models.blocks import Block, BlockKind, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.devices.device import Event, T
from hetero_ee.runtime.devices.machine import BESIDE_KV_TYPE, BESIDE_ROWS, Machine
from hetero_ee.runtime.executors.executor import BlockExecutor
from hetero_ee.runtime.work import BlockWorks
from hetero_ee.speculation.sources.eagle3 import NORM_ALL, NORM_EACH, Eagle3
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.weight import Weight

FC, EMBEDDING = "fc", "embedding.tokens"  # matrices in addition to those of the layer's blocks
EMBEDDING_NORM, HIDDEN_NORM, HEAD_NORM, FC_NORM = "embedding_norm", "hidden_norm", "head_norm", "fc_norm"


@dataclass(frozen=True, slots=True, eq=False)
class DraftHead:
    """Weights of a head as in its file: fp32 matrices under the names of layer_blocks(spec).

    FC is (d, 2d), optionally with a bias. EMBEDDING (vocab, d) exists if it differs from the model's, and HEAD_ROWS (k,
    d) if the head has its own logits.
    """

    spec: ModelSpec  # spec of the head's layer
    weights: ModelWeights
    draft_token_ids: Tensor | None = None  # (k,) ascending int64, the tokens it drafts; None for all
    eagle3: Eagle3 | None = None  # None: EAGLE-1


def layer_blocks(spec: ModelSpec, eagle3: Eagle3 | None = None) -> list[Block]:
    """Return the attention and the FFN. The attention has no input norm; in EAGLE-3 it reads two normed states."""
    attention, ffn = (block for block in decoder_blocks(spec) if block.layer is not None)
    tensors = {short: tensor for short, tensor in attention.tensors.items() if short != "norm"}
    if eagle3 is not None:
        n_rows, n_columns = tensors["qkv"].shape
        tensors["qkv"] = replace(tensors["qkv"], shape=(n_rows, 2 * n_columns))
    return [replace(attention, tensors=tensors, has_norm=False), ffn]


def fc_block(spec: ModelSpec, eagle3: Eagle3 | None = None) -> Block:
    """Return fc and, for EAGLE-3, its norms as a block that belongs to no layer."""
    size = spec.hidden_size
    vectors = {f"{FC}_bias": size}
    n_columns = 2 * size
    if eagle3 is not None:
        n_columns = len(eagle3.captured) * size
        vectors |= dict.fromkeys((EMBEDDING_NORM, HIDDEN_NORM, HEAD_NORM), size) | _fc_norms(eagle3, size)
    tensors = {name: TensorSpec(name, TensorRole.VECTOR, (n,)) for name, n in vectors.items()}
    tensors[FC] = TensorSpec(FC, TensorRole.MATRIX, (size, n_columns))
    return Block(FC, BlockKind.LAYER, None, tensors, has_norm=False)


def _fc_norms(eagle3: Eagle3, size: int) -> dict[str, int]:
    """Return the sizes of the norms in fc, by name."""
    n_seen = len(eagle3.captured)
    if eagle3.fc_norm == NORM_EACH:
        return {f"{FC_NORM}.{number}": size for number in range(n_seen)}
    return {FC_NORM: n_seen * size} if eagle3.fc_norm == NORM_ALL else {}


class DraftHeadLayer:
    """Computes a head on the CPU or GPU of a machine, next to the head's KV cache. `executor` runs fc_block and
    layer_blocks on that processor. `embedding` is the head's own; it is None to use the model's. A token's bits depend
    only on that token and its sequence."""

    def __init__(
        self,
        executor: BlockExecutor,
        spec: ModelSpec,
        embedding: Weight | None,
        machine: Machine,
        *,
        on_gpu: bool,
        eagle3: Eagle3 | None = None,
    ) -> None:
        self.cache, self._executor, self._eagle3 = executor.cache, executor, eagle3
        self._spec, self._blocks, self._embedding = spec, layer_blocks(spec, eagle3), embedding
        self._machine, self._on_gpu = machine, on_gpu
        self._works = DraftHeadWorks(spec, eagle3)

    def guess(self, embedded: Tensor, states: Tensor, batch: Batch) -> Tensor:
        """Return the next states (m, d), fp32 on the head's device, from embeddings and last states, both (m, d)."""
        self.cache.admit(batch)
        here, ready = self._moved("verified states", states)
        entered, entered_ready = self._moved("draft embedding", embedded)

        def compute() -> Tensor:
            eagle3, executor = self._eagle3, self._executor
            if eagle3 is None:
                found = executor.forward(*self._joined(entered, here, batch))
            else:
                found = executor.forward(*self._attended(eagle3, entered, here, batch))
                found = executor.normed(found, HEAD_NORM) if eagle3.norm_output else found
            return self._marked(found)

        return self._run(self._works.guess(batch), compute, (*ready, *entered_ready))

    def _joined(self, embedded: Tensor, states: Tensor, batch: Batch) -> tuple[Tensor, Batch, list[Block]]:
        """Return the input of an EAGLE-1 head's blocks: fc of the embeddings and the states."""
        return self._executor.linear(torch.cat([embedded, states], 1), FC), batch, self._blocks

    def _attended(
        self, eagle3: Eagle3, embedded: Tensor, states: Tensor, batch: Batch
    ) -> tuple[Tensor, Batch, list[Block]]:
        """Run the attention of EAGLE-3 and return the input of the remaining block."""
        executor, (attention, ffn) = self._executor, self._blocks
        normed = executor.normed(states, HIDDEN_NORM)
        x = torch.cat([executor.normed(embedded, EMBEDDING_NORM), normed], 1)
        mixed = executor.mix(x, batch, attention)
        return (normed if eagle3.norm_before_residual else states) + mixed, batch, [ffn]

    def normed(self, state: Tensor) -> Tensor:
        """Return the normed state, from which logits are computed, of a state (1, d) of `guess`."""
        if self._eagle3 is None or self._eagle3.norm_output:
            return state
        return self.on_device(lambda: self._marked(self._executor.normed(state, HEAD_NORM)))

    def keep(self, normed: Tensor, captured: Sequence[Tensor], put: Callable[[int, Tensor], None]) -> None:
        """Call `put` with states of verified tokens, (m, d) on the head's device, and the number of their first row.

        The states are the final normed states, or fc of the captured ones for EAGLE-3.

        Raises: ValueError: if captured states are missing.
        """
        eagle3 = self._eagle3
        if eagle3 is None:
            here, ready = self._moved("verified states", normed)
            self._run([], lambda: put(0, here), ready)
            return
        if len(captured) != len(eagle3.captured):
            raise ValueError(f"{len(captured)} states were captured for a head that sees {len(eagle3.captured)}.")
        for first in range(0, len(normed), BESIDE_ROWS):
            some = [each[first : first + BESIDE_ROWS] for each in captured]
            parts, ready = self._gathered(some)
            compute = partial(self._put_fused, eagle3, parts, first, put)
            self._run(self._works.fuse(len(parts[0])), compute, ready)

    def _put_fused(
        self, eagle3: Eagle3, parts: Sequence[Tensor], first: int, put: Callable[[int, Tensor], None]
    ) -> None:
        """Call `put` with fc of the captured states, each (m, d)."""
        executor, fc_norm = self._executor, eagle3.fc_norm
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
    """Descriptions of a 4-bit draft head's work, for the device that runs or emulates it."""

    def __init__(self, spec: ModelSpec, eagle3: Eagle3 | None) -> None:
        self._blocks, self._is_eagle1 = layer_blocks(spec, eagle3), eagle3 is None
        self._works = BlockWorks(spec, self._blocks, BESIDE_KV_TYPE)
        n_states = 2 if eagle3 is None else len(eagle3.captured)
        self._fc = Product("int4", spec.hidden_size, n_states * spec.hidden_size)

    def guess(self, batch: Batch) -> list[Work]:
        """Return the work of one guess for each token: the layer and, for EAGLE-1, fc."""
        attention, ffn = self._works.through(self._blocks, batch)
        fc = (self._fc,) if self._is_eagle1 else ()
        return [
            replace(attention, name="draft_head.attention", products=(*fc, *attention.products)),
            replace(ffn, name="draft_head.ffn"),
        ]

    def fuse(self, m: int) -> list[Work]:
        """Return the work of EAGLE-3's fc for m verified tokens."""
        return [Work("draft_head.fc", m, (self._fc,))]
