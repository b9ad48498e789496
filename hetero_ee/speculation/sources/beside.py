"""Opens what computes drafts on the machine that runs the model, and opens it again after a change of plan."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from hetero_ee.errors import HeteroError
from hetero_ee.runtime.devices.cpu import host_machine
from hetero_ee.runtime.devices.device import GPU
from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.planned import PlannedExecutor

Running = Callable[[], PlannedExecutor]
T = TypeVar("T")


class BesideOpener(ABC, Generic[T]):
    """Base of openers, which are called for each draft.

    Args:
        target: the model whose text is drafted.
        running: returns the executor of its plan; None without a plan, so that drafts are computed on the CPU.
        warn: called for each plan that leaves no memory for drafting.
        name: what is opened, for people.
    """

    def __init__(
        self, target: Executor, running: Running | None, warn: Callable[[str], None] | None, name: str
    ) -> None:
        self._target, self._running, self._warn, self._name = target, running, warn, name
        self._host = host_machine()
        self._found: T | None = None
        self._has_tried = False
        self._beside: PlannedExecutor | None = None  # the executor for which something was opened or found no memory

    def __call__(self) -> T | None:
        """Return what computes drafts under the current plan, or None if there is no memory for it."""
        if not self._has_tried or self._beside is not self._now():
            try:
                self.open()
            except HeteroError as error:
                if self._warn is not None:
                    self._warn(f"{error} Drafting without the {self._name}.")
        return self._found

    def open(self) -> None:
        """Open it on the machine that runs the model now.

        Raises: DeviceMemoryError: if the memory that the plan reserves for it is not available.
        """
        self._found, self._has_tried, self._beside = None, True, self._now()
        running = self._beside
        machine = self._host if running is None else running.machine
        self._found = self._opened(machine, on_gpu=running is not None and running.plan.draft_device == GPU)

    def _now(self) -> PlannedExecutor | None:
        return None if self._running is None else self._running()

    @abstractmethod
    def _opened(self, machine: Machine, *, on_gpu: bool) -> T | None:
        """Open it on this machine. Return None if the model changed its plan meanwhile."""
