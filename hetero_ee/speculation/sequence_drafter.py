"""SequenceDrafter: draft sequences proposed by sources that need none of the model's layers."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from math import prod

from torch import Tensor

from hetero_ee.decoding.texts import Text, common_length
from hetero_ee.errors import DeviceLostError, DeviceMemoryError, UsageError
from hetero_ee.runtime.drafted import Drafted, DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import Branch, DraftSampler, DraftStep
from hetero_ee.speculation.sources.source import Draft, DraftSource
from hetero_ee.speculation.stop_rule import StopRule


class SequenceDrafter:
    """Asks sources that compute, then free ones to go on; a free one begins where it is expected to save more."""

    def __init__(
        self,
        executor: Executor,
        sources: Sequence[DraftSource],
        rule: StopRule,
        sampler: DraftSampler,
        warn: Callable[[str], None],
    ) -> None:
        self._free = [source for source in sources if source.is_free]
        self._computing = [source for source in sources if not source.is_free]
        self._executor, self._rule, self._sampler, self._warn = executor, rule, sampler, warn

    def draft(self, steps: Sequence[DraftStep]) -> None:
        """Adds each step's drafts; all its tokens wait before the first layer."""
        for step in steps:
            self._rule.n_beside = sum(len(each.tokens) for each in steps) - len(step.tokens)
            if self._computing and self._begun_by_a_free_source(step):
                continue
            for source in (*self._computing, *self._free):
                self._extend(step, source)
            if len(step.tokens) < step.max_tokens and step.text.constraint is None:
                self._branch(step)

    def _branch(self, step: DraftStep) -> None:
        """Adds second choices, and what free sources would have said instead, while they are worth their time."""
        for source in self._free if step.origins else ():
            self._compare(step, source)
        for each in sorted(step.candidates, key=lambda branch: -branch.chance):
            is_full = len(step.tokens) >= step.max_tokens
            if is_full or not self._rule.is_worth_branch(each.chance, len(step.tokens)):
                return
            step.add_branch(each)

    def _compare(self, step: DraftStep, source: DraftSource) -> None:
        """A free source's drafts from the text's end on become a branch where they leave the sequence."""
        said = [token.token_id for token in step.tokens[step.root + 1 :]]
        choose = partial(self._choose, step.text)
        with closing(source.drafts(step.text.cached_as, step.text.token_ids, choose)) as generated:
            drafts = list(islice(generated, len(said)))
        n_common = common_length([draft.token_id for draft in drafts], said)
        chance = prod(step.chances[:n_common])
        parent: int | Branch = n_common
        for draft in drafts[n_common:]:
            chance *= draft.confidence * (1 - step.chances[n_common] if parent == n_common else 1.0)
            same = (each for each in step.candidates if (each.parent, each.token_id) == (parent, draft.token_id))
            found = next(same, None)
            if found is None:
                if not self._may_branch(step.text, draft.token_id):
                    return
                found = Branch(parent, draft.token_id, source.name, chance)
                step.candidates.append(found)
            parent, chance = found, min(chance, found.chance)

    def _may_branch(self, text: Text, token_id: int) -> bool:
        return 0 <= token_id < self._executor.spec.vocab_size and not text.ends_with(token_id)

    def _begun_by_a_free_source(self, step: DraftStep) -> bool:
        """Whether a free source's drafts, added here, save more than any number of computed ones would."""
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

    def _extend(self, step: DraftStep, source: DraftSource) -> None:
        """Adds the source's drafts while they are worth their time; one that computes is always asked for the first, so
        that its chance stays known."""
        first = len(step.origins)
        while self._begins_again(step, source, first):
            pass

    def _begins_again(self, step: DraftStep, source: DraftSource, first: int) -> bool:
        """The same up to drafts that must follow one of the source's: whether it has to go on after those."""
        if step.text.constraint is not None and not source.is_free and step.origins:
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
        drafts = source.drafts(step.text.cached_as, step.history, partial(self._choose, step.text))
        return drafts if step.text.constraint is None else _legal(step, drafts)

    def _is_worth(self, step: DraftStep, source: DraftSource, chance: float, n_before: int = 0) -> bool:
        return self._rule.is_worth([*step.chances, chance], (1 + n_before) * source.draft_s)

    def _next(self, drafts: Generator[Draft]) -> Draft | None:
        try:
            return next(drafts, None)
        except (DeviceMemoryError, DeviceLostError, UsageError) as error:  # the last of a cache that texts share
            self._warn(f"{error} No drafts follow in this step")
            return None

    def _add(self, step: DraftStep, source: DraftSource, draft: Draft) -> None:
        """The draft, if there is room; a token that ends the text, or is not the model's, ends the step's drafts."""
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
            self._add_seconds(step, source, draft, chance)
        if step.text.ends_with(draft.token_id):
            step.end()
        else:
            step.add(draft.token_id, source.name, chance)

    def _add_seconds(self, step: DraftStep, source: DraftSource, draft: Draft, chance: float) -> None:
        """What may come in the next draft's place, which is right with this chance."""
        left = prod(step.chances) * (1 - chance)
        for number, other in enumerate(draft.others):
            if number == 0:
                step.seconds[len(step.tokens) - 1] = other
            right = self._rule.second_chance(other.confidence)
            if self._may_branch(step.text, other.token_id):
                step.candidates.append(Branch(len(step.chances), other.token_id, source.name, left * right))
            left *= 1 - right

    def _choose(self, text: Text, hidden: Tensor, end: DraftEnd, history: Sequence[int]) -> Drafted:
        return self._sampler.drafted(self._executor, hidden, end, [(text, history)])[0]


def _legal(step: DraftStep, drafts: Generator[Draft]) -> Generator[Draft]:
    """Those before the first that the text's grammar does not let follow."""
    history = step.history
    with closing(drafts):
        for draft in drafts:
            allowed = step.text.allowed_after(history)
            is_token = allowed is not None and 0 <= draft.token_id < len(allowed)
            if allowed is not None and is_token and not allowed[draft.token_id]:
                return
            history.append(draft.token_id)
            yield draft
            if not is_token or step.text.ends_with(draft.token_id) or step.text.is_complete_after(history):
                return
