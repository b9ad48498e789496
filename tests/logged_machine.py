"""A machine that writes down what its GPU and its link are asked to do, and which operations the GPU then runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from hetero_ee.costs.work import Work
from hetero_ee.ops.gpu_operations import GpuOperations
from hetero_ee.runtime.devices.device import Device, Event, Link
from hetero_ee.runtime.devices.machine import Machine


@dataclass(frozen=True)
class Run:
    """A launch of the GPU's work: what was charged, and what was computed."""

    names: tuple[str, ...]
    operations: tuple[str, ...]


@dataclass(frozen=True)
class Crossing:
    """What the link brought to a device. kind: "copy" or "transfer"."""

    kind: str
    name: str
    to: str
    n_bytes: int


@dataclass
class Log:
    runs: list[Run] = field(default_factory=list)
    crossings: list[Crossing] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)  # of the GPU, in order

    def machine(self, machine: Machine) -> Machine:
        """The same machine, written down."""
        if machine.gpu is None or machine.link is None:
            return machine
        gpu: Any = _LoggedDevice(machine.gpu, self)
        link: Any = _LoggedLink(machine.link, self)
        return replace(machine, gpu=gpu, link=link)

    def gpu_operations(self, operations: GpuOperations) -> GpuOperations:
        """The same operations, written down."""

        def logged(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
            def computed(*arguments: Any, **named: Any) -> Any:
                self.operations.append(name)
                return compute(*arguments, **named)

            return computed

        names = [each.name for each in fields(operations) if not each.name.startswith(("prepare", "is_"))]
        return replace(operations, **{name: logged(name, getattr(operations, name)) for name in names})

    @property
    def names(self) -> set[tuple[str, str]]:
        """Everything that the GPU and the link were asked for, by where."""
        found = {("gpu", name) for run in self.runs for name in run.names}
        return found | {(f"{each.kind} to the {each.to}", each.name) for each in self.crossings}

    def clear(self) -> None:
        for each in (self.runs, self.crossings, self.operations):
            each.clear()


class _LoggedDevice:
    def __init__(self, inner: Device, log: Log) -> None:
        self._inner, self._log = inner, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, works: Sequence[Work], compute: Callable[[], Any], after: Sequence[Event] = ()) -> Any:
        first = len(self._log.operations)
        found = self._inner.run(works, compute, after)
        self._log.runs.append(Run(tuple(work.name for work in works), tuple(self._log.operations[first:])))
        return found


class _LoggedLink:
    def __init__(self, inner: Link, log: Log) -> None:
        self._inner, self._log = inner, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def copy(self, name: str, n_bytes: int, to: str, compute: Callable[[], Any], after: Sequence[Event] = ()) -> Any:
        self._log.crossings.append(Crossing("copy", name, to, n_bytes))
        return self._inner.copy(name, n_bytes, to, compute, after)

    def transfer(
        self, name: str, n_rows: int, row_bytes: int, to: str, compute: Callable[[], Any], after: Sequence[Event] = ()
    ) -> Any:
        found, event = self._inner.transfer(name, n_rows, row_bytes, to, compute, after)
        if isinstance(found, Tensor):
            assert found.nbytes == n_rows * row_bytes, f"{name}: other bytes are charged than cross"
        self._log.crossings.append(Crossing("transfer", name, to, n_rows * row_bytes))
        return found, event
