"""Machine: the devices that a plan runs on, and transfers of hidden states between them."""

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
    """Copies tensors between CPU and GPU."""

    def is_on_gpu(self, x: Tensor) -> bool: ...

    def to_gpu(self, x: Tensor) -> Tensor:
        """Begin to copy x to the GPU and return the copy; return x if it is on the GPU already."""
        ...

    def to_cpu(self, x: Tensor) -> Tensor:
        """Begin to copy x to the CPU, unless it is there. The result stays valid during one more call."""
        ...


class CpuCopier:
    """The copier of a machine without a GPU."""

    def is_on_gpu(self, x: Tensor) -> bool:
        return False

    def to_gpu(self, x: Tensor) -> Tensor:
        raise AssertionError("there is no GPU")

    def to_cpu(self, x: Tensor) -> Tensor:
        return x


# Makes the source of streamed blocks from these, their weights, the link, and the bytes copied with each, by number.
MakeSource = Callable[[Sequence[Block], ModelWeights, Link, Callable[[int], int]], BlockSource]
BESIDE_ROWS = 128  # per pass of a draft head: more need more memory, fewer read its weights more often
BESIDE_KV_TYPE = "fp16"  # of a draft head, whose last bits change no output
# Opens an executor on the GPU for these blocks of a draft head, with a cache of this many tokens.
OpenBeside = Callable[[ModelSpec, ModelWeights, Sequence[Block], int], "BlockExecutor"]


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices that a plan runs on.

    `gpu`, `link` and `make_source` are None without a GPU. `open_beside` is None if draft heads run on the CPU.
    """

    cpu: Device
    gpu: Device | None
    link: Link | None
    copier: Copier
    make_source: MakeSource | None = None
    new_worker: Callable[[], futures.Executor] = AtOnce  # fetches streamed blocks
    open_beside: OpenBeside | None = None
    traffic: Traffic = field(default_factory=Traffic)
    opened_beside: "list[BlockExecutor]" = field(default_factory=list)  # closed with the model's executor

    def device(self, *, on_gpu: bool) -> Device:
        if not on_gpu:
            return self.cpu
        assert self.gpu is not None, "something is asked of a GPU that is not there"
        return self.gpu

    def moved(
        self, name: str, x: Tensor, ready: tuple[Event, ...] = (), *, to_gpu: bool
    ) -> tuple[Tensor, tuple[Event, ...]]:
        """Move x (m, columns) to the GPU or the CPU, unless it is there. The host waits for copies to the CPU.

        Returns:
            The tensor, in a buffer of the copier if it was moved, and the events to wait for before reading it.
        """
        if self.copier.is_on_gpu(x) == to_gpu:
            return (x if self.link is not None else x.cpu()), ready  # it may come from a GPU that is no longer used
        assert self.link is not None, "something is to be moved to a GPU that is not there"
        self.traffic.moved(name, len(x) * x.shape[1] * FLOAT_BYTES, to_gpu=to_gpu)
        move, target = (self.copier.to_gpu, GPU) if to_gpu else (self.copier.to_cpu, CPU)
        after = ready or (self.device(on_gpu=True).run([], lambda: None)[1],)  # all work of the GPU so far
        found, event = self.link.transfer(name, len(x), x.shape[1] * FLOAT_BYTES, target, partial(move, x), after)
        if to_gpu:
            return found, (event,)
        event.wait()
        return found, ()
