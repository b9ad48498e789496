"""The settings with which exact mode drafts: the exit layer or the sources, the draft length and the stop rule."""

from collections.abc import Callable
from dataclasses import dataclass

from hetero_ee.errors import UsageError
from hetero_ee.models.blocks import has_trees
from hetero_ee.options.engine import MAX_DRAFT_LENGTH, MAX_TREE_WIDTH
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.exit_drafter import ExitDrafter
from hetero_ee.speculation.sequence_drafter import SequenceDrafter
from hetero_ee.speculation.sources.source import DraftSource
from hetero_ee.speculation.speed_switch import SpeculationSwitch
from hetero_ee.speculation.stop_rule import StopRule


@dataclass(frozen=True, slots=True)
class Drafting:
    """Drafts by early exit after `exit_layer` layers, or by draft sources if `exit_layer` is 0.

    Raises: UsageError: if the exit layer or the draft length is out of range.
    """

    exit_layer: int
    draft_length: int  # tokens of one request in one verification, 1 to MAX_DRAFT_LENGTH
    rule: StopRule  # whether one more draft is worth it
    exit_end: DraftEnd | None = None  # turns states at the exit layer into drafts
    sources: tuple[DraftSource, ...] = ()
    warn: Callable[[str], None] | None = None  # called, once per loop, if something could not draft
    switch: SpeculationSwitch | None = None  # turns slow drafting off; None to draft always
    async_layers: int = 0  # layers that the GPU runs for a guess while the CPU verifies
    tree_width: int = 1  # most drafts after the same token, by sources that can draft trees; 1 for chains

    def __post_init__(self) -> None:
        if self.exit_layer < 0 or (self.exit_layer > 0) != (self.exit_end is not None):
            raise UsageError(f"exit layer is {self.exit_layer}; expected 1 or more for exits, 0 for other drafts.")
        if not 1 <= self.tree_width <= MAX_TREE_WIDTH:
            raise UsageError(f"tree width is {self.tree_width}; expected 1 to {MAX_TREE_WIDTH}.")
        if not 1 <= self.draft_length <= MAX_DRAFT_LENGTH:
            raise UsageError(f"draft length is {self.draft_length}; expected 1 to {MAX_DRAFT_LENGTH}.")

    @property
    def origin(self) -> str:
        """A short description of where drafts come from."""
        return self.sources[-1].name if self.exit_end is None else f"exit after layer {self.exit_layer}"

    def close(self, sequence: int) -> None:
        """Free the draft sources' memory for a sequence of the KV cache."""
        for source in self.sources:
            source.close(sequence)

    def drafter(
        self, executor: Executor, sampler: DraftSampler, warn: Callable[[str], None]
    ) -> SequenceDrafter | ExitDrafter:
        """Return a drafter for one decoding loop. Raises: UsageError: if no layer follows the exit layer."""
        spec, end = executor.spec, self.exit_end
        if self.exit_layer >= spec.n_layers:
            raise UsageError(f"exit layer is {self.exit_layer}; expected 0 to {spec.n_layers - 1}, of this model.")
        if end is None:
            width = self.tree_width if self.tree_width == 1 or has_trees(spec) else 1
            return SequenceDrafter(executor, self.sources, self.rule, sampler, warn, width)
        return ExitDrafter(executor, self.exit_layer, end, self.rule, sampler, warn, guesses_next=self.async_layers > 0)
