"""Grows a tree of drafts, in which a token may have several drafts after it, level by level.

A draft's chance is the product of the chances on its path. Each level extends the `width` likeliest drafts of the last
one, while the likeliest path is worth one more level. Then the likeliest drafts of all levels become the step's, while
each is worth one more token in the verification. Source: EAGLE-2 (arXiv 2406.16858), with the stop rule in place of a
fixed number of drafts and levels.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod

from torch import Tensor

from hetero_ee.runtime.drafted import Drafted, DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler, DraftStep
from hetero_ee.speculation.sources.source import Draft, TreeSource
from hetero_ee.speculation.stop_rule import StopRule


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """A draft that may become a part of the tree."""

    draft: Draft
    chances: list[float]  # of the drafts on its path, its own included
    parent: "_Candidate | None"
    place: tuple[int, int]  # number of its parent among the nodes of a level, and its own among the parent's drafts

    @property
    def chance(self) -> float:
        return prod(self.chances)


class TreeGrower:
    """Adds trees of drafts to steps. `width`: drafts after the same token, and drafts of a level that are extended."""

    def __init__(
        self, executor: Executor, rule: StopRule, sampler: DraftSampler, width: int, n_judged: int = 0
    ) -> None:
        """Create a grower. `n_judged`: least tokens after each extended one that a step's `judged` lists."""
        self._executor, self._rule, self._sampler, self._width = executor, rule, sampler, width
        self._n_judged = max(width, n_judged)

    def grow(self, step: DraftStep, source: TreeSource) -> bool:
        """Add a tree of the source's drafts to a step without drafts. Return whether the source could make one."""
        if not step.has_room:
            return True

        def choose(states: Tensor, end: DraftEnd, histories: Sequence[Sequence[int]]) -> list[list[Drafted]]:
            rows = [(step.request, history) for history in histories]
            return self._sampler.several(self._executor, states, end, rows, self._n_judged)

        found, nodes = list[_Candidate](), list[_Candidate | None]([None])
        with closing(source.levels(step.request.kv_sequence, step.history, choose)) as levels:
            drafts = next(levels, None)
            if drafts is None:
                return False
            for depth in range(1, step.max_drafts + 1):
                self._rule.spend(source.draft_s)
                new = [
                    self._candidate(draft, parent, (number, place))
                    for number, (parent, row) in enumerate(zip(nodes, drafts, strict=True))
                    for place, draft in enumerate(row)
                ]
                found += new
                extended = self._extended(step, source, new, depth)
                if not extended or depth == step.max_drafts:
                    break
                try:
                    drafts, nodes = levels.send([each.place for each in extended]), [*extended]
                except StopIteration:
                    break
        self._add(step, source, found)
        return True

    def _candidate(self, draft: Draft, parent: _Candidate | None, place: tuple[int, int]) -> _Candidate:
        before = [] if parent is None else parent.chances
        return _Candidate(draft, [*before, self._rule.chance(draft.confidence)], parent, place)

    def _extended(self, step: DraftStep, source: TreeSource, new: Sequence[_Candidate], depth: int) -> list[_Candidate]:
        """Return the candidates of a level that are extended together; none if another level is not worth its time."""
        going = [
            each for each in new if each.place[1] < self._width and not step.request.ends_with(each.draft.token_id)
        ]
        best = sorted(going, key=lambda each: -each.chance)[: self._width]
        chances = [sum(each.chance for each in best), self._rule.mean_chance]  # at most one of the paths is right
        return best if self._rule.is_worth(chances, source.draft_s, depth + 1) else []

    def _add(self, step: DraftStep, source: TreeSource, found: Sequence[_Candidate]) -> None:
        """Add the likeliest candidates that are worth their time, the likeliest path first, which then is a chain.

        A step always gets one, so that the source's acceptance stays known.
        """
        chosen: list[_Candidate | None] = [None]
        for each in sorted(found, key=lambda each: -each.chance):
            is_last = len(chosen) > step.max_drafts or step.request.ends_with(each.draft.token_id)
            if is_last or each.place[1] >= self._width or each.parent not in chosen:
                continue
            if len(chosen) == 1 or self._rule.is_worth(each.chances, 0.0, len(chosen)):
                chosen.append(each)
        self._add_after(step, source, None, 0, chosen, found)

    def _add_after(
        self,
        step: DraftStep,
        source: TreeSource,
        parent: _Candidate | None,
        index: int,
        chosen: Sequence[_Candidate | None],
        found: Sequence[_Candidate],
    ) -> None:
        """Add the chosen candidates after tokens[index], each followed by its own, and record all that were judged."""
        for each in found:
            if each.parent is parent:
                step.judge(each.draft.token_id, each.draft.confidence, index)
        for child in chosen[1:]:
            if child is not None and child.parent is parent:
                added = step.add(child.draft.token_id, source.name, child.chances[-1], index)
                self._add_after(step, source, child, added, chosen, found)
