"""Exact speculative decoding: tokens are drafted, then verified by all layers, several in one pass.

A draft-verify step of each text: its last token and drafts after it wait, at the exit layer or before the first; one
pass of all that wait through the remaining layers reads their weights once; the full logits of token j choose the token
after it with that position's noise. Drafts that are that token are kept; the first that is not is corrected, and what
came after it is rolled back. Every token is thus what full.py chooses, from the same bits. Source: speculative decoding
by a model's own early layers, LayerSkip (arXiv 2404.16710); derived for the shared noise.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

from torch import Tensor

from hetero_ee.decoding.result import EXIT, FULL_MODEL, GeneratedToken, TokenOrigin
from hetero_ee.decoding.sampling import SamplingParams
from hetero_ee.decoding.steps import Take
from hetero_ee.decoding.texts import Ending, Prompts, Text, in_own_sequences, prefill, step, texts_of
from hetero_ee.errors import DeviceLostError, DeviceMemoryError, UsageError
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.choice import all_finite
from hetero_ee.runtime.executors.executor import Executor, Observe
from hetero_ee.speculation.asynchronous import AsyncDrafting
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.drafts import DraftSampler, DraftStep
from hetero_ee.speculation.sources.source import DraftSource
from hetero_ee.speculation.speed_switch import SpeculationSwitch
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.waiting import WaitingToken
from hetero_ee.text.text_stream import Decode


def generate_exact(
    executor: Executor,
    prompts: Prompts,
    params: SamplingParams,
    ending: Ending,
    decode: Decode,
    clock: Callable[[], float],
    drafting: Drafting,
    counts: DraftCounts | None = None,
) -> Iterator[GeneratedToken]:
    """Yields the tokens that full.generate yields, each text's in the same order; texts take turns by steps.

    counts: counts them. Of a Continuation the draft sources have observed what the cache holds. Closing the iterator
    frees the sequences' memory. Raises UsageError for an exit layer that the model does not have.
    """
    texts = texts_of(prompts, params, decode, ending, clock())
    passes = ExactPasses(executor, drafting, counts or DraftCounts(), clock)
    closing = [source.close for source in drafting.sources]
    yield from in_own_sequences(executor, texts, passes.tokens(texts), *closing)


class ExactPasses:
    """What brings texts their tokens; see SharedPasses. Texts may come and go between two of its passes."""

    def __init__(self, executor: Executor, drafting: Drafting, counts: DraftCounts, clock: Callable[[], float]) -> None:
        self._executor, self._drafting, self._counts, self._clock = executor, drafting, counts, clock
        self._sampler = DraftSampler()
        self._drafter = drafting.drafter(executor, self._sampler, self._warn)
        self._guesses = AsyncDrafting(executor, drafting.exit_layer, drafting.async_layers, counts)
        self.observe: Observe | None = self._read if drafting.sources else None
        self._has_warned = False

    def tokens(self, texts: list[Text]) -> Iterator[GeneratedToken]:
        """The rest of each prompt, a token of each, then draft-verify steps. In the end no guess is left in the
        cache."""
        try:
            logits_of = []
            for text in texts:
                self.begin(text)
                logits_of.append(prefill(self._executor, text, self.observe))
            for text, logits in zip(texts, logits_of, strict=True):
                yield step(text, logits, self._clock())
            while active := [text for text in texts if not text.finished]:
                for take in self.run(active):
                    yield from take()
        finally:
            self.leave(texts)

    def begin(self, text: Text) -> None:
        """Of its prompt only what the cache holds was read."""
        for source in self._drafting.sources:
            with self._surviving(source, "forget what was rolled back"):
                source.truncate(text.cached_as, self._executor.cache.length(text.cached_as))

    def leave(self, texts: Sequence[Text]) -> None:
        """No guess of theirs is left in the cache."""
        self._guesses.drop(texts)

    def run(self, texts: Sequence[Text]) -> list[Take]:
        """Drafts of every text and one pass that verifies them all; timed without whoever takes the tokens."""
        switch, start_s = self._drafting.switch, self._clock()
        steps = self._drafted(texts) if switch is None or switch.drafts else self._undrafted(texts)
        verified = self._verify(steps)
        timing = _Timing(switch, len(steps), sum(len(each.tokens) for each in steps), self._clock() - start_s)
        return [partial(self._taken, timing, *each) for each in verified]

    def _taken(
        self, timing: "_Timing", drafted: DraftStep, states: Sequence[Tensor], logits: Tensor
    ) -> list[GeneratedToken]:
        start_s, tokens = self._clock(), list[GeneratedToken]()
        try:
            tokens = self._accepted(drafted, states, logits, timing.n_in_pass)
        finally:
            timing.add(self._clock() - start_s, len(tokens))
        return tokens

    def _drafted(self, texts: Sequence[Text]) -> list[DraftStep]:
        steps = [self._begun(text, self._guesses.take(text)) for text in texts]
        self._drafter.draft(steps)
        return steps

    def _undrafted(self, texts: Sequence[Text]) -> list[DraftStep]:
        self._guesses.drop(texts)
        return [self._begun(text) for text in texts]

    def _begun(self, text: Text, guess: WaitingToken | None = None) -> DraftStep:
        """With the drafts that are certain. guess: the text's last token, where it has passed layers already."""
        n_drafts = min(self._drafting.draft_length, text.tokens_left) - 1
        begun = DraftStep(text, n_drafts, [guess] if guess else self._missing(text), self._drafting.tree_tokens)
        begun.add_forced()
        return begun

    def _missing(self, text: Text) -> list[WaitingToken]:
        """The text's last token, and those before it whose keys and values did not stay: right branches."""
        first = self._executor.cache.length(text.cached_as)
        return [WaitingToken(text.token_ids[at], text.cached_as, at) for at in range(first, len(text.token_ids))]

    def _verify(self, steps: Sequence[DraftStep]) -> list[tuple[DraftStep, Sequence[Tensor], Tensor]]:
        """All waiting tokens through the remaining layers and the lm_head: each step's states, see DraftSource.observe,
        and logits."""
        normed = self._executor.final_norm(self._guesses.run_remaining_layers(steps))
        logits, states = self._executor.lm_head(normed), (normed, *self._executor.captured)
        self._counts.n_passes += 1
        bounds = pairwise(accumulate((len(each.tokens) for each in steps), initial=0))
        return [(each, [x[a:b] for x in states], logits[a:b]) for each, (a, b) in zip(steps, bounds, strict=True)]

    def _accepted(
        self, drafted: DraftStep, states: Sequence[Tensor], logits: Tensor, n_in_pass: int
    ) -> list[GeneratedToken]:
        """The step's tokens, up to where none of the drafts is right; everything else is rolled back. n_in_pass: tokens
        that the pass took of all texts."""
        text, rows = drafted.text, {node: row for row, node in enumerate(drafted.depth_first())}
        tokens: list[GeneratedToken] = []
        path, right = list[int](), list[int]()  # what tokens came of; drafts that were right
        node: int | None = drafted.root
        while node is not None and not text.finished:
            # A token that full.py would fail at is left for a step of its own, after the tokens that come before.
            if path and not all_finite(logits[rows[node]]):
                break
            path.append(node)
            tokens.append(step(text, logits[rows[node]], self._clock(), self._sampler.noise.of_token))
            self._audit(drafted, node, tokens[-1].token_id)
            node = drafted.child(node, tokens[-1].token_id)
            right += [] if node is None else [node]
            tokens[-1] = replace(tokens[-1], origin=self._origin(drafted, len(path) - 1, node))
        self._roll_back(drafted, path, [_at(x, [rows[each] for each in path]) for x in states])
        self._drafting.rule.settle(len(rows), len(tokens), n_in_pass, len(drafted.branches))
        self._count(drafted, path, right)
        if text.finished:
            self._sampler.noise.close(text.sequence)
        return tokens

    def _audit(self, drafted: DraftStep, node: int, token_id: int) -> None:
        """Tells the rule what came after one of the tokens."""
        if node in drafted.judged:
            (judged_id, confidence), second = drafted.judged[node], drafted.seconds.get(node)
            self._drafting.rule.audit(confidence, judged_id == token_id)
            if second is not None and judged_id != token_id:
                self._drafting.rule.audit_second(second.confidence, second.token_id == token_id)

    def _origin(self, drafted: DraftStep, index: int, node: int | None) -> TokenOrigin:
        """Of the step's token of this index, which this draft has foretold, None for none."""
        name = FULL_MODEL if node is None else drafted.origin(node)
        depth = self._drafting.exit_layer if name == EXIT else self._executor.spec.n_layers
        return TokenOrigin(name, depth, index, len(drafted.origins))

    def _count(self, drafted: DraftStep, path: Sequence[int], right: Sequence[int]) -> None:
        end = drafted.end_of_sequence
        n_tokens = sum(node <= end for node in path)
        self._counts.add_step(drafted.origins, sum(node <= end for node in right), n_tokens)
        self._counts.n_again += drafted.root
        if drafted.branches:
            n_checked = sum(each > end for node in path for each in drafted.children.get(node, ()))
            n_right = sum(node > end for node in right)
            self._counts.add_branches(len(drafted.branches), n_checked, n_right, len(path) - n_tokens)

    def _roll_back(self, drafted: DraftStep, path: Sequence[int], states: Sequence[Tensor]) -> None:
        """Keeps in the cache what is the text's and stayed there: not its last token, which only a right guess has put
        there, nor right branches. states: of the path's tokens."""
        text, first_position = drafted.text, drafted.tokens[drafted.root].position
        if not self._guesses.keep_if_right(text):
            self._executor.cache.truncate(text.cached_as, first_position + drafted.n_kept(path))
        token_ids = text.token_ids[first_position : first_position + len(path)]
        self._observe(Batch.of_sequence(text.cached_as, first_position, token_ids), states)

    def _read(self, batch: Batch, normed: Tensor, *captured: Tensor) -> None:
        """The sources read a chunk of a prompt: the prompt's time, of which each one's part is counted."""
        sequence, first_position = batch.sequences[0], batch.positions[0]
        for source in self._drafting.sources:
            start_s = self._clock()
            with self._surviving(source, "read the prompt"):
                source.truncate(sequence, first_position)
                source.read_prompt(sequence, first_position, batch.token_ids, normed, *captured)
            self._counts.add_reading(source.name, self._clock() - start_s)

    def _observe(self, batch: Batch, states: Sequence[Tensor]) -> None:
        """Tells the sources of one sequence's verified tokens, in place of what they have guessed there."""
        if not self._drafting.sources:
            return
        sequence, first_position = batch.sequences[0], batch.positions[0]
        for source in self._drafting.sources:
            with self._surviving(source, "keep the verified tokens"):
                source.truncate(sequence, first_position)
                source.observe(sequence, first_position, batch.token_ids, *states)

    @contextmanager
    def _surviving(self, source: DraftSource, what: str) -> Iterator[None]:
        """Inside, a source that finds no memory, in a cache that texts share too, costs its drafts alone."""
        try:
            yield
        except (DeviceMemoryError, DeviceLostError, UsageError) as error:
            self._warn(f"{error} Source {source.name} could not {what}")

    def _warn(self, what: str) -> None:
        if self._drafting.warn is not None and not self._has_warned:
            self._drafting.warn(f"{what}; these tokens pass every layer one by one, as in mode full.")
        self._has_warned = True


@dataclass(slots=True)
class _Timing:
    """Of one pass: what its texts' parts take, for the switch."""

    switch: SpeculationSwitch | None
    n_left: int  # of its texts
    n_in_pass: int  # tokens
    seconds: float
    n_tokens: int = 0  # that came out

    def add(self, seconds: float, n_tokens: int) -> None:
        """A text has taken its tokens."""
        self.n_left, self.seconds, self.n_tokens = self.n_left - 1, self.seconds + seconds, self.n_tokens + n_tokens
        if self.switch is not None and not self.n_left:
            self.switch.ended(self.seconds, self.n_tokens)


def _at(states: Tensor, rows: list[int]) -> Tensor:
    """States (m, hidden) of these rows; where they follow each other, where they lie."""
    if rows == [*range(rows[0], rows[0] + len(rows))]:
        return states[rows[0] : rows[0] + len(rows)]
    return states[rows]
