"""Exact speculative decoding: tokens are drafted, and one pass through all layers verifies several of them.

A draft-verify step of a request consists of its last token and the drafts after it. They are pending at the exit layer,
or before the first layer. One pass takes the pending tokens of all requests through the remaining layers, so those
weights are read once. The full model's logits after each token choose the next one, with the noise of its position.
Drafts are kept while they equal the chosen tokens. The first wrong draft is replaced by the chosen token, and
everything after it is rolled back. So every token is the one that full mode chooses, from the same bits. Source:
self-speculative decoding, LayerSkip (arXiv 2404.16710); derived for the shared noise.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

from torch import Tensor

from hetero_ee.decoding.loop import Mode, Take
from hetero_ee.decoding.requests import Request, step
from hetero_ee.decoding.result import EXIT, FULL_MODEL, GeneratedToken, TokenOrigin
from hetero_ee.errors import DeviceLostError, DeviceMemoryError, UsageError
from hetero_ee.kv.batch import Batch
from hetero_ee.runtime.choice import all_finite
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.asynchronous import AsyncDrafting
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.drafts import DraftSampler, DraftStep
from hetero_ee.speculation.pending import PendingToken
from hetero_ee.speculation.sources.source import DraftSource
from hetero_ee.speculation.speed_switch import SpeculationSwitch
from hetero_ee.speculation.statistics import DraftCounts


class ExactMode(Mode):
    """A Mode that runs draft-verify steps of several sequences, which share every pass."""

    def __init__(self, executor: Executor, drafting: Drafting, counts: DraftCounts, clock: Callable[[], float]) -> None:
        self._executor, self._drafting, self._counts, self._clock = executor, drafting, counts, clock
        self._sampler = DraftSampler()
        self._drafter = drafting.drafter(executor, self._sampler, self._warn)
        self._guesses = AsyncDrafting(executor, drafting.exit_layer, drafting.async_layers, counts)
        self.observe = self._read if drafting.sources else None
        self._has_warned = False

    def begin(self, request: Request) -> None:
        """Make the draft sources forget the positions that the KV cache does not hold."""
        for source in self._drafting.sources:
            with self._surviving(source, "forget what was rolled back"):
                source.truncate(request.kv_sequence, self._executor.cache.length(request.kv_sequence))

    def leave(self, requests: Sequence[Request]) -> None:
        """Roll back the next-token guesses of these sequences."""
        self._guesses.drop(requests)

    def close(self, sequence: int) -> None:
        """Free the draft sources' memory for the sequence."""
        self._drafting.close(sequence)

    def advance(self, requests: Sequence[Request]) -> list[Take]:
        """Draft for every request and verify all drafts in one pass. The time of emitting the tokens is added later."""
        switch, start_s = self._drafting.switch, self._clock()
        steps = self._drafted(requests) if switch is None or switch.drafts else self._undrafted(requests)
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

    def _drafted(self, requests: Sequence[Request]) -> list[DraftStep]:
        steps = [
            self._begun(request, self._guesses.take(request) or PendingToken.last_of(request)) for request in requests
        ]
        self._drafter.draft(steps)
        return steps

    def _undrafted(self, requests: Sequence[Request]) -> list[DraftStep]:
        self._guesses.drop(requests)
        return [self._begun(request, PendingToken.last_of(request)) for request in requests]

    def _begun(self, request: Request, last: PendingToken) -> DraftStep:
        """Begin a step with the drafts that the grammar forces."""
        begun = DraftStep(request, min(self._drafting.draft_length, request.tokens_left) - 1, [last])
        begun.add_forced()
        return begun

    def _verify(self, steps: Sequence[DraftStep]) -> list[tuple[DraftStep, Sequence[Tensor], Tensor]]:
        """Run all pending tokens through the remaining layers and the lm_head.

        Returns: Each step with its normed and captured states (see DraftSource.observe) and its logits.
        """
        normed = self._executor.final_norm(self._guesses.run_remaining_layers(steps))
        logits, states = self._executor.lm_head(normed), (normed, *self._executor.captured)
        self._counts.n_passes += 1
        bounds = pairwise(accumulate((len(each.tokens) for each in steps), initial=0))
        return [(each, [x[a:b] for x in states], logits[a:b]) for each, (a, b) in zip(steps, bounds, strict=True)]

    def _accepted(
        self, drafted: DraftStep, states: Sequence[Tensor], logits: Tensor, n_in_pass: int
    ) -> list[GeneratedToken]:
        """Return the step's tokens up to and including the correction of the first wrong draft, and roll back the rest.

        Args:
            n_in_pass: Number of tokens of all requests in the pass.
        """
        request, rule, n_verified = drafted.request, self._drafting.rule, len(drafted.tokens)
        tokens: list[GeneratedToken] = []
        path: list[int] = []  # of tokens after which one was emitted
        child: int | None = 0
        while child is not None and not request.finished:
            # A token at which full mode would fail gets a step of its own, so that the tokens before it are emitted.
            if child > 0 and not all_finite(logits[child]):
                break
            path.append(child)
            tokens.append(step(request, logits[child], self._clock(), self._sampler.noise.of_token))
            token_id = tokens[-1].token_id
            for judged_id, confidence in drafted.judged.get(child, ()):
                rule.audit(confidence, judged_id == token_id)
            child = drafted.child(child, token_id)
            tokens[-1] = replace(tokens[-1], origin=self._origin(drafted, len(path) - 1, child))
        n_accepted = len(path) - (child is None)
        self._roll_back(drafted, path, states)
        rule.settle(n_verified, len(tokens), n_in_pass)
        self._counts.add_step(_accepted_first(drafted, path, child), n_accepted, len(tokens))
        if request.finished:
            self._sampler.noise.close(request.index)
        return tokens

    def _origin(self, drafted: DraftStep, place: int, child: int | None) -> TokenOrigin:
        """Return the origin of the step's token at this place, which the draft `child` predicted; None if none did."""
        name = FULL_MODEL if child is None else drafted.origins[child - 1]
        depth = self._drafting.exit_layer if name == EXIT else self._executor.spec.n_layers
        return TokenOrigin(name, depth, place, len(drafted.origins))

    def _roll_back(self, drafted: DraftStep, path: Sequence[int], states: Sequence[Tensor]) -> None:
        """Keep in the KV cache what precedes the request's last token, unless a right guess has already started on
        that token."""
        request, first = drafted.request, drafted.tokens[0].position
        if not self._guesses.keep_if_right(request):
            slots = [drafted.tokens[index].slot for index in path]
            self._executor.keep_path(request.kv_sequence, first, slots)
        token_ids = [drafted.tokens[index].token_id for index in path]
        verified = [x[: len(path)] if path[-1] < len(path) else x[path] for x in states]
        self._observe(Batch.of_sequence(request.kv_sequence, first, token_ids), verified)

    def _read(self, batch: Batch, normed: Tensor, *captured: Tensor) -> None:
        """Let the sources read a chunk of a prompt, and measure the time of each source."""
        sequence, first_position = batch.sequences[0], batch.positions[0]
        for source in self._drafting.sources:
            start_s = self._clock()
            with self._surviving(source, "read the prompt"):
                source.truncate(sequence, first_position)
                source.read_prompt(sequence, first_position, batch.token_ids, normed, *captured)
            self._counts.add_reading(source.name, self._clock() - start_s)

    def _observe(self, batch: Batch, states: Sequence[Tensor]) -> None:
        """Replace what the sources hold for unverified tokens of one sequence by its verified tokens."""
        if not self._drafting.sources:
            return
        sequence, first_position = batch.sequences[0], batch.positions[0]
        for source in self._drafting.sources:
            with self._surviving(source, "keep the verified tokens"):
                source.truncate(sequence, first_position)
                source.observe(sequence, first_position, batch.token_ids, *states)

    @contextmanager
    def _surviving(self, source: DraftSource, what: str) -> Iterator[None]:
        """Turn a source's failure, such as lack of memory, into a warning. Only its drafts are lost."""
        try:
            yield
        except (DeviceMemoryError, DeviceLostError, UsageError) as error:
            self._warn(f"{error} Source {source.name} could not {what}")

    def _warn(self, what: str) -> None:
        if self._drafting.warn is not None and not self._has_warned:
            self._drafting.warn(f"{what}; these tokens pass every layer one by one, as in mode full.")
        self._has_warned = True


def _accepted_first(drafted: DraftStep, path: Sequence[int], child: int | None) -> list[str]:
    """Return the drafts' origins, those on the accepted path first."""
    accepted = [*path[1:], *([] if child is None else [child])]
    others = [index for index in range(1, len(drafted.tokens)) if index not in accepted]
    return [drafted.origins[index - 1] for index in (*accepted, *others)]


@dataclass(slots=True)
class _Timing:
    """Total time of one pass and of emitting its tokens, reported to the speculation switch."""

    switch: SpeculationSwitch | None
    n_left: int  # requests that have not taken their tokens yet
    n_in_pass: int  # tokens in the pass
    seconds: float
    n_tokens: int = 0  # tokens emitted

    def add(self, seconds: float, n_tokens: int) -> None:
        """Add the time that one request needed to emit its tokens. The last request reports the total to the switch."""
        self.n_left, self.seconds, self.n_tokens = self.n_left - 1, self.seconds + seconds, self.n_tokens + n_tokens
        if self.switch is not None and not self.n_left:
            self.switch.ended(self.seconds, self.n_tokens)
