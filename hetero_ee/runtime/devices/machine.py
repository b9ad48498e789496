"""Machine: the devices a plan runs on, and how hidden states move between them."""

from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from hetero_ee.costs.product import FLOAT_BYTES
from hetero_ee.models.blocks import Block
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.devices.device import CPU, GPU, Device, Event, Link
from hetero_ee.runtime.devices.traffic import Traffic
from hetero_ee.runtime.streaming.streaming import AtOnce, BlockSource
from hetero_ee.weights.model_weights import ModelWeights

if TYPE_CHECKING:
    from hetero_ee.runtime.executors.executor import BlockExecutor


class Copier(Protocol):
    """Where a tensor lies, and how it gets elsewhere."""

    def is_on_gpu(self, x: Tensor) -> bool: ...

    def to_gpu(self, x: Tensor) -> Tensor:
        """The same on the GPU, itself where it is there; begun, not waited for."""
        ...

    def to_cpu(self, x: Tensor) -> Tensor:
        """The same on the CPU, itself where it is there; begun, not waited for. Valid until the second call after."""
        ...


class CpuCopier:
    """Of a machine without a GPU."""

    def is_on_gpu(self, x: Tensor) -> bool:
        return False

    def to_gpu(self, x: Tensor) -> Tensor:
        raise AssertionError("there is no GPU")

    def to_cpu(self, x: Tensor) -> Tensor:
        return x


# Makes the source of streamed blocks: their weights, the link, and bytes of what comes along with each, by number.
MakeSource = Callable[[Sequence[Block], ModelWeights, Link, Callable[[int], int]], BlockSource]
BESIDE_ROWS = 128  # of one pass there: more take more memory, fewer read its weights more often
BESIDE_KV_TYPE = "fp16"  # of a model beside: its last bits change no text
# Opens on the GPU what computes these blocks of another, small model, with room for so many tokens.
OpenBeside = Callable[[ModelSpec, ModelWeights, Sequence[Block], int], "BlockExecutor"]


@dataclass(frozen=True, slots=True)
class Machine:
    """gpu, link, make_source: None where there is no GPU. open_beside: None where the CPU computes in its place."""

    cpu: Device
    gpu: Device | None
    link: Link | None
    copier: Copier
    make_source: MakeSource | None = None
    new_worker: Callable[[], futures.Executor] = AtOnce  # of what fetches streamed blocks
    open_beside: OpenBeside | None = None
    traffic: Traffic = field(default_factory=Traffic)
    opened_beside: "list[BlockExecutor]" = field(default_factory=list)  # to be closed with what runs the model

    def device(self, *, on_gpu: bool) -> Device:
        """The GPU, or the CPU."""
        if not on_gpu:
            return self.cpu
        assert self.gpu is not None, "something is asked of a GPU that is not there"
        return self.gpu

    def moved(
        self, name: str, x: Tensor, ready: tuple[Event, ...] = (), *, to_gpu: bool
    ) -> tuple[Tensor, tuple[Event, ...]]:
        """x (m, columns) on that device, and what must be reached before it is read there; itself where it is there.

        The host waits for what comes to the CPU. On the other device it lies in a buffer, see Copier.
        """
        if self.copier.is_on_gpu(x) == to_gpu:
            return (x if self.link is not None else x.cpu()), ready  # it may come from a GPU that was given up
        assert self.link is not None, "something is to be moved to a GPU that is not there"
        self.traffic.moved(name, len(x) * x.shape[1] * FLOAT_BYTES, to_gpu=to_gpu)
        move, target = (self.copier.to_gpu, GPU) if to_gpu else (self.copier.to_cpu, CPU)
        after = ready or (self.device(on_gpu=True).run([], lambda: None)[1],)  # all work the GPU was given so far
        found, event = self.link.transfer(name, len(x), x.shape[1] * FLOAT_BYTES, target, partial(move, x), after)
        if to_gpu:
            return found, (event,)
        event.wait()
        return found, ()
