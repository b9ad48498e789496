"""Machine: the devices a plan runs on, and how hidden states move between them."""

from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hetero_ee.models.blocks import Block
from hetero_ee.runtime.devices.device import Device, Link
from hetero_ee.runtime.streaming.streaming import AtOnce, BlockSource
from hetero_ee.weights.model_weights import ModelWeights


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


@dataclass(frozen=True, slots=True)
class Machine:
    """gpu, link, make_source: None where there is no GPU."""

    cpu: Device
    gpu: Device | None
    link: Link | None
    copier: Copier
    make_source: MakeSource | None = None
    new_worker: Callable[[], futures.Executor] = AtOnce  # of what fetches streamed blocks
