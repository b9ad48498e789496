"""A draft head placed on a machine's CPU or GPU: the same numbers, and the device is told what they take."""

from collections.abc import Callable, Sequence

from torch import Tensor

from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.parts import FLOAT_BYTES
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.devices.device import CPU, GPU, Device, Event
from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.runtime.kv.cpu import CpuKvCache
from hetero_ee.runtime.work import Attention, Overhead, Work
from hetero_ee.speculation.sources.draft_head_layer import DraftHeadLayer

EMBEDDING, LOGITS = "draft embedding", "draft logits"  # what crosses the link


def draft_head_works(spec: ModelSpec, batch: Batch) -> list[Work]:
    """What one guess of each row takes: fc and the layer of this spec, in 4 bits, keys and values in fp32."""
    m, size = len(batch), spec.hidden_size
    attention = Attention(max(batch.positions) + 1, 2 * spec.kv_size * FLOAT_BYTES)
    first = (("int4", size, 2 * size), ("int4", spec.query_size + 2 * spec.kv_size, size))
    second = (("int4", 2 * spec.ffn_size, size), ("int4", size, spec.ffn_size))
    return [
        Work("draft_head.attention", m, (*first, ("int4", size, spec.query_size)), attention, Overhead.HALF_LAYER),
        Work("draft_head.ffn", m, second, None, Overhead.HALF_LAYER),
    ]


def vocabulary_work(m: int, n_tokens: int, hidden_size: int) -> Work:
    """What the logits of m guesses take over so many tokens."""
    return Work("draft_head.vocabulary", m, (("int8", n_tokens, hidden_size),), None, Overhead.PASS)


class PlacedDraftHeadLayer:
    """`layer`, which computes on the machine's GPU or CPU. spec: its shape. Guesses lie there, logits on the CPU.

    machine: the one that runs the model now; on_gpu: on its GPU, as long as it has one.
    """

    def __init__(self, layer: DraftHeadLayer, spec: ModelSpec, machine: Callable[[], Machine], *, on_gpu: bool) -> None:
        self._layer, self._spec, self._machine_now, self._wants_gpu = layer, spec, machine, on_gpu

    @property
    def _machine(self) -> Machine:
        return self._machine_now()

    @property
    def _on_gpu(self) -> bool:
        return self._wants_gpu and self._machine.gpu is not None

    @property
    def cache(self) -> CpuKvCache:
        """See DraftHeadLayer.cache."""
        return self._layer.cache

    def guess(self, embedded: Tensor, states: Tensor, batch: Batch) -> Tensor:
        """See DraftHeadLayer.guess. On a GPU the embeddings cross the link first; verified states are there already."""
        copier, works = self._machine.copier, draft_head_works(self._spec, batch)
        inputs = (copier.to_cpu(embedded), copier.to_cpu(states))
        if not self._on_gpu:
            return self._machine.cpu.run(works, lambda: self._layer.guess(*inputs, batch))[0]
        transferred = self._transferred(EMBEDDING, embedded, GPU, ())
        return self._gpu.run(works, lambda: copier.to_gpu(self._layer.guess(*inputs, batch)), (transferred,))[0]

    def embed(self, token_ids: list[int]) -> Tensor | None:
        """See DraftHeadLayer.embed."""
        return self._layer.embed(token_ids)

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
        self._machine.cpu.wait(self._transferred(LOGITS, found, CPU, (computed,)))
        return found

    @property
    def _gpu(self) -> Device:
        assert self._machine.gpu is not None, "looked at before"
        return self._machine.gpu

    def _transferred(self, name: str, x: Tensor, to: str, after: Sequence[Event]) -> Event:
        """The event of x (m, columns) transfer to that device."""
        assert self._machine.link is not None, "looked at before"
        n_rows, n_columns = x.shape
        return self._machine.link.transfer(name, n_rows, n_columns * FLOAT_BYTES, to, lambda: None, after)[1]
