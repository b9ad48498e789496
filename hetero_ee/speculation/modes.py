"""The decoding modes that an engine's plan chooses, and the statistics of the latest one."""

from collections.abc import Callable

from hetero_ee.decoding.loop import FullMode, Mode, SeparateModes
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.early_exit import EarlyExitMode, EarlyExits
from hetero_ee.speculation.exact import ExactMode
from hetero_ee.speculation.statistics import DraftCounts, DraftStatistics, ExitCounts, ExitStatistics
from hetero_ee.speculation.tree_exits import TreeExitMode


class Modes:
    """Makes modes as planned: full mode without drafting and exits. It keeps no reference to the executor."""

    def __init__(self, drafting: Drafting | None, exits: EarlyExits | None, clock: Callable[[], float]) -> None:
        self.drafting, self.exits, self.clock = drafting, exits, clock
        self._draft_counts, self._exit_counts = DraftCounts(), ExitCounts()

    def new(self, executor: Executor) -> Mode:
        """Return a new mode, with all statistics at zero."""
        if self.exits is not None:
            self._exit_counts = ExitCounts()
            return self._early_exit(executor, self.exits)
        if self.drafting is not None:
            self._draft_counts = DraftCounts()
            return ExactMode(executor, self.drafting, self._draft_counts, self.clock)
        return FullMode(executor, self.clock)

    def for_servers(self, executor: Executor) -> Mode:
        """Return a mode for sequences that join and leave. In an early-exit mode each has passes of its own."""
        exits = self.exits
        return self.new(executor) if exits is None else SeparateModes(lambda: self._early_exit(executor, exits))

    def close(self, sequence: int) -> None:
        """Free the memory that drafting needs for a sequence."""
        for drafting in (self.drafting, self.exits):
            if drafting is not None:
                drafting.close(sequence)

    def draft_statistics(self, n_layers: int) -> DraftStatistics | None:
        return None if self.drafting is None else self._draft_counts.statistics(n_layers, self.drafting.exit_layer)

    def exit_statistics(self, n_layers: int) -> ExitStatistics | None:
        return None if self.exits is None else self._exit_counts.statistics(n_layers)

    def _early_exit(self, executor: Executor, exits: EarlyExits) -> EarlyExitMode:
        mode = TreeExitMode if exits.tree_width > 1 else EarlyExitMode
        return mode(executor, exits, self._exit_counts, self.clock)
