"""Drafts of draft sources, which don't run the model's layers."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice

from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.errors import DeviceLostError, DeviceMemoryError, UsageError
from hetero_ee.runtime.drafted import Drafted, DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler, DraftStep
from hetero_ee.speculation.sources.source import Draft, DraftsFromStates, DraftSource, TreeSource
from hetero_ee.speculation.stop_rule import StopRule
from hetero_ee.speculation.tree_grower import TreeGrower


class SequenceDrafter:
    """Drafts with computing sources, then free ones. A free source goes first if it is expected to save more time.

    tree_width: drafts after the same token, and tokens that a source extends together; 1 for chains.
    """

    def __init__(
        self,
        executor: Executor,
        sources: Sequence[DraftSource],
        rule: StopRule,
        sampler: DraftSampler,
        warn: Callable[[str], None],
        tree_width: int = 1,
    ) -> None:
        self._free = [source for source in sources if source.is_free]
        self._computing = [source for source in sources if not source.is_free]
        self._executor, self._rule, self._sampler, self._warn = executor, rule, sampler, warn
        self._grower = None if tree_width == 1 else TreeGrower(executor, rule, sampler, tree_width)

    def draft(self, steps: Sequence[DraftStep]) -> None:
        """Add drafts to each step. Afterwards all tokens of the steps are pending before the first layer."""
        for step in steps:
            self._rule.n_beside = sum(len(each.tokens) for each in steps) - len(step.tokens)
            if self._computing and self._begun_by_a_free_source(step):
                continue
            if any(self._grows(step, source) for source in self._computing):
                continue
            for source in (*self._computing, *self._free):
                self._extend(step, source)

    def _begun_by_a_free_source(self, step: DraftStep) -> bool:
        """Add a free source's drafts if they save more time than computed ones. Return whether they were added."""
        chances = [self._rule.mean_chance] * step.max_drafts
        computed_s = max(self._rule.best_length(chances, source.draft_s)[1] for source in self._computing)
        for source in self._free:
            drafts = list(islice(self._drafts(step, source), step.max_drafts))
            n_best, saved_s = self._rule.best_length([draft.confidence for draft in drafts], 0.0)
            if saved_s > computed_s:
                for draft in drafts[:n_best]:
                    self._add(step, source, draft)
                step.add_forced()
                return True
        return False

    def _grows(self, step: DraftStep, source: DraftSource) -> bool:
        """Add a tree of the source's drafts, if it can make one, and return whether it did."""
        if self._grower is None or step.origins or step.request.constraint is not None:
            return False
        try:
            return isinstance(source, TreeSource) and self._grower.grow(step, source)
        except (DeviceMemoryError, DeviceLostError, UsageError) as error:
            self._warn(f"{error} No drafts follow in this step")
            return True

    def _extend(self, step: DraftStep, source: DraftSource) -> None:
        """Add the source's drafts while they are worth their time.

        A computing source always makes its first draft, so that its acceptance stays known.
        """
        first = len(step.origins)
        while self._begins_again(step, source, first):
            pass

    def _begins_again(self, step: DraftStep, source: DraftSource, first: int) -> bool:
        """Add the source's drafts until the grammar forces some. Return whether the source continues after those."""
        if step.request.constraint is not None and not source.is_free and step.origins:
            n_before = len(step.origins)  # drafts, each of which it has to read
            if not self._is_worth(step, source, self._rule.mean_chance, n_before):
                return False
            self._rule.spend(n_before * source.draft_s)
        with closing(self._drafts(step, source)) as drafts:
            while step.has_room:
                is_another = not source.is_free and len(step.origins) > first
                if is_another and not self._is_worth(step, source, self._rule.mean_chance):
                    return False
                draft = self._next(drafts)
                if draft is None or (source.is_free and not self._is_worth(step, source, draft.confidence)):
                    return False
                self._add(step, source, draft)
                if step.add_forced():
                    return True
        return False

    def _drafts(self, step: DraftStep, source: DraftSource) -> Generator[Draft]:
        drafts = source.drafts(step.request.kv_sequence, step.history, partial(self._choose, step.request))
        return drafts if step.request.constraint is None else _legal(step, drafts)

    def _is_worth(self, step: DraftStep, source: DraftSource, chance: float, n_before: int = 0) -> bool:
        return self._rule.is_worth([*step.chances, chance], (1 + n_before) * source.draft_s)

    def _next(self, drafts: Generator[Draft]) -> Draft | None:
        try:
            return next(drafts, None)
        except (DeviceMemoryError, DeviceLostError, UsageError) as error:  # the last of a cache that requests share
            self._warn(f"{error} No drafts follow in this step")
            return None

    def _add(self, step: DraftStep, source: DraftSource, draft: Draft) -> None:
        """Add the draft if there is room. A token that ends the request, or that the model lacks, ends the step."""
        if not step.has_room:
            return
        chance = draft.confidence
        if not 0 <= draft.token_id < self._executor.spec.vocab_size:
            self._warn(f"{source.name} drafts token {draft.token_id}, which this model does not have")
            step.end()
            return
        if not source.is_free:
            self._rule.spend(source.draft_s)
            step.judge(draft.token_id, draft.confidence)
            chance = self._rule.chance(draft.confidence)
        if step.request.ends_with(draft.token_id):
            step.end()
        else:
            step.add(draft.token_id, source.name, chance)

    def _choose(
        self,
        request: Request,
        state: Tensor,
        end: DraftEnd,
        history: Sequence[int],
        by: DraftsFromStates | None = None,
    ) -> Drafted:
        return self._sampler.drafted(by or self._executor, state, end, [(request, history)])[0]


def _legal(step: DraftStep, drafts: Generator[Draft]) -> Generator[Draft]:
    """Yield the drafts that precede the first one that the request's grammar forbids."""
    history = step.history
    with closing(drafts):
        for draft in drafts:
            allowed = step.request.allowed_after(history)
            is_token = allowed is not None and 0 <= draft.token_id < len(allowed)
            if allowed is not None and is_token and not allowed[draft.token_id]:
                return
            history.append(draft.token_id)
            yield draft
            if not is_token or step.request.ends_with(draft.token_id) or step.request.is_complete_after(history):
                return
