"""Early-exit decoding: a token that exits is emitted unverified, and the remaining layers are skipped.

A step runs the last token of every request through the layers. A token that the policy lets exit stays pending. It runs
its skipped layers together with a later token that goes deeper. This catching up is exact, and cheaper than
approximating the missing keys and values (docs/exit_modes_results.md). Tokens that don't exit pass every layer and are
the same as in full mode. Source: SpecEE (arXiv 2504.08850) for the exits, EE-LLM (arXiv 2312.04916) for catching up.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from hetero_ee.decoding.loop import Mode, Take
from hetero_ee.decoding.requests import Ending, Request, prefill, step, taken
from hetero_ee.decoding.result import EXIT, GeneratedToken, TokenOrigin
from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.audit import ExitAudit, is_audited
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.pending import PendingToken, advance, batch_of, captured_states, stacked
from hetero_ee.speculation.policies.draft_candidates import DraftCandidates
from hetero_ee.speculation.policies.policy import ExitPolicy
from hetero_ee.speculation.speed_switch import SpeculationSwitch
from hetero_ee.speculation.statistics import ExitCounts
from hetero_ee.speculation.stop_rule import StopRule


@dataclass(frozen=True, slots=True)
class EarlyExits:
    """Settings of early-exit decoding: the exit policy, the limit on pending tokens, and the audit."""

    policy: ExitPolicy
    max_pending: int  # tokens of one request that may wait; the next one passes every layer
    candidates: DraftCandidates | None = None  # the policy's draft head, which also reads prompts
    audit: ExitAudit | None = None  # compares some exits with the full model; once it is breached nothing exits
    warn: Callable[[str], None] | None = None  # called when the audit is breached
    tree_width: int = 1  # of mode specee: most drafts after the same token; 1 judges single tokens
    rule: StopRule | None = None  # which drafts a tree gets
    switch: SpeculationSwitch | None = None  # turns trees off while they are slower; None to grow them always

    def close(self, sequence: int) -> None:
        if self.candidates is not None:
            self.candidates.close(sequence)


class Passed(NamedTuple):
    """State of a sequence's last token after the layers that it passed in a step."""

    request: Request
    depth: int  # layers passed
    hidden: Tensor  # (hidden,) after them
    token_id: int | None  # next token, chosen at an exit; None if all layers were passed
    logits: Tensor | None  # (vocab,) of those that passed all layers


def score_early(
    executor: Executor, token_ids: Sequence[int], n_prompt_tokens: int, exits: EarlyExits, counts: ExitCounts
) -> Iterator[tuple[Tensor, int]]:
    """Yield, for each token after the prompt, the logits (vocab,) that predict it and the number of layers passed.

    The KV cache is filled as it would be while generating in this mode.

    Raises: UsageError: if the prompt is empty, or nothing follows it.
    """
    if not 0 < n_prompt_tokens < len(token_ids):
        raise UsageError(
            f"{n_prompt_tokens} of {len(token_ids)} tokens are the prompt; expected from 1 to all but one."
        )
    params = SamplingParams(max_new_tokens=len(token_ids) - n_prompt_tokens)  # policies go by how far a request is
    ending = Ending(frozenset(), executor.cache.max_tokens)
    prompt_ids, sequence = list(token_ids[:n_prompt_tokens]), executor.cache.open_new()
    request = Request.of_prompt(0, prompt_ids, params, ending, lambda ids: "", sequence)
    mode = EarlyExitMode(executor, exits, counts, lambda: 0.0)
    try:
        mode.begin(request)
        yield prefill(executor, request, mode.observe), executor.spec.n_layers
        for token_id in token_ids[n_prompt_tokens:-1]:
            request.token_ids.append(token_id)
            for passed in mode.passed([request]):
                yield mode.logits(passed), passed.depth
    finally:
        executor.cache.close(sequence)
        mode.close(sequence)


class EarlyExitMode(Mode):
    """A Mode in which sequences emit their tokens at early exits.

    The last tokens of all sequences share each step. A policy such as SkipDecode may decide by all requests of the
    step.
    """

    def __init__(self, executor: Executor, exits: EarlyExits, counts: ExitCounts, clock: Callable[[], float]) -> None:
        self._executor, self._exits, self._counts, self._clock = executor, exits, counts, clock
        self._sampler = DraftSampler()
        self._judge = exits.policy.judging(executor, self._sampler)
        self._pending: dict[int, list[PendingToken]] = {}  # by sequence: its last token and those before it that exited
        self._audited: dict[int, list[tuple[PendingToken, int]]] = {}  # audited tokens and the token emitted after each
        self.observe = None if exits.candidates is None else exits.candidates.read_prompt

    def begin(self, request: Request) -> None:
        self._judge.begin(request)

    def advance(self, requests: Sequence[Request]) -> list[Take]:
        """See Mode. A token counts as emitted when it exits, before other sequences pass deeper layers."""
        takes: dict[int, Take] = {}
        try:
            for passed in self.passed(requests):
                takes[passed.request.kv_sequence] = partial(list, [self._emitted(passed)])
        except HeteroError as error:
            if not takes:
                raise
            return [takes.get(request.kv_sequence, partial(_fail, error)) for request in requests]
        return [takes[request.kv_sequence] for request in requests]

    def leave(self, requests: Sequence[Request]) -> None:
        """Cut the cache to the tokens that have passed every layer. A later step catches up with the others."""
        cache = self._executor.cache
        for request in requests:
            self._pending.pop(request.kv_sequence, None)
            self._audited.pop(request.kv_sequence, None)
            if request.kv_sequence in cache.sequences:
                cache.cut(request.kv_sequence, cache.length(request.kv_sequence))

    def close(self, sequence: int) -> None:
        self._exits.close(sequence)

    def logits(self, passed: Passed) -> Tensor:
        """Return the logits (vocab,) from which the token after this one is chosen."""
        return self._judge.logits(passed.depth, passed.hidden[None])[0] if passed.logits is None else passed.logits

    def passed(self, requests: Sequence[Request]) -> Iterator[Passed]:
        """Run the last token of every sequence until it exits, and yield each token as soon as it has exited."""
        layers_of = {request.kv_sequence: self._exit_layers(request) for request in requests}
        going = list(requests)
        for request in requests:
            self._pending[request.kv_sequence] = [*self._pending_of(request), PendingToken.last_of(request)]
        depth = 0
        for exit_layer in sorted({layer for layers in layers_of.values() for layer in layers}):
            asked = [each for each in going if exit_layer in layers_of[each.kv_sequence] and self._judge.may_exit(each)]
            if asked:
                depth = exit_layer
                self._advance(going, exit_layer)
                exited = [passed for passed in self._judged(exit_layer, asked) if passed.token_id is not None]
                going = [request for request in going if all(request is not passed.request for passed in exited)]
                yield from map(self._ended, exited)
        self._counts.add_step(self._executor.spec.n_layers if going else depth)
        yield from map(self._ended, self._all_layers(going))

    def _pending_of(self, request: Request) -> list[PendingToken]:
        """Return the request's tokens, except the last one, that have not passed all layers."""
        if request.kv_sequence not in self._pending:
            sequence, ids = request.kv_sequence, request.token_ids
            lacking = range(self._executor.cache.length(sequence), len(ids) - 1)
            self._pending[sequence] = [PendingToken(ids[at], sequence, at) for at in lacking]
        return self._pending[request.kv_sequence]

    def _exit_layers(self, request: Request) -> Sequence[int]:
        """Return the layers where the last token may exit: none if the audit is breached or max_pending is reached."""
        is_breached = self._exits.audit is not None and self._exits.audit.is_breached
        if is_breached or len(self._pending_of(request)) >= self._exits.max_pending:
            return ()
        return self._judge.exit_layers(request)

    def _advance(self, requests: Sequence[Request], to_layer: int) -> None:
        advance(
            self._executor, [token for request in requests for token in self._pending[request.kv_sequence]], to_layer
        )

    def _judged(self, exit_layer: int, requests: Sequence[Request]) -> list[Passed]:
        hidden = states_of([self._pending[request.kv_sequence][-1] for request in requests])
        self._counts.n_judged[exit_layer] += len(requests)
        chosen = self._judge.judge(exit_layer, hidden, requests)
        rows = zip(requests, hidden.unbind(), chosen, strict=True)
        return [Passed(request, exit_layer, state, token_id, None) for request, state, token_id in rows]

    def _all_layers(self, requests: Sequence[Request]) -> list[Passed]:
        """Run these sequences' last tokens and pending tokens through all remaining layers."""
        if not requests:
            return []
        n_layers = self._executor.spec.n_layers
        self._advance(requests, n_layers)
        self._observe(requests)
        audited = [(request, *each) for request in requests for each in self._audited.pop(request.kv_sequence, ())]
        last = [self._pending[request.kv_sequence][-1] for request in requests]
        hidden = states_of([*last, *(token for _, token, _ in audited)])
        logits = self._executor.to_logits(hidden)
        self._audit(audited, logits[len(requests) :])
        rows = zip(requests, hidden.unbind(), logits.unbind(), strict=False)
        return [Passed(request, n_layers, state, None, row) for request, state, row in rows]

    def _observe(self, requests: Sequence[Request]) -> None:
        """Let the draft source read these sequences' tokens, all of which have passed every layer now."""
        if self._exits.candidates is None:
            return
        for request in requests:
            tokens = self._pending[request.kv_sequence]
            normed = self._executor.final_norm(states_of(tokens))
            self._exits.candidates.observe(batch_of(tokens), normed, *captured_states(tokens))

    def _audit(self, audited: Sequence[tuple[Request, PendingToken, int]], logits: Tensor) -> None:
        """Compare the token ids emitted at audited exits with the full model's choices, from its logits (m, vocab)."""
        for (request, token, token_id), row in zip(audited, logits, strict=True):
            audit, warn = self._exits.audit, self._exits.warn
            assert audit is not None, "there is something to audit"
            was_breached = audit.is_breached
            audit.observe(self._sampler.choose(request, request.token_ids[: token.position + 1], row) != token_id)
            if audit.is_breached and not was_breached and warn is not None:
                warn(
                    f"{audit.n_different} of {audit.n_audited} audited exits differ from the full model, more than was "
                    "certified: no token exits any more. These requests are unlike those of the certificate."
                )

    def _ended(self, passed: Passed) -> Passed:
        """Count the token and return it. A token that exited stays pending until a later token goes deeper."""
        request, pending = passed.request, self._pending[passed.request.kv_sequence]
        if passed.token_id is not None and self._exits.audit is not None:
            token = pending[-1]
            if is_audited(request.params.seed, request.index, token.position):
                self._audited.setdefault(request.kv_sequence, []).append((token, passed.token_id))
        if passed.logits is not None:
            pending.clear()
        self._counts.add_token(passed.depth)
        self._judge.given_out(request, passed.depth, passed.hidden)
        return passed

    def _emitted(self, passed: Passed) -> GeneratedToken:
        if passed.token_id is None:
            assert passed.logits is not None, "it passed all layers"
            return step(passed.request, passed.logits, self._clock())
        token = taken(passed.request, passed.token_id, self._clock())
        return replace(token, origin=TokenOrigin(EXIT, passed.depth))


def _fail(error: HeteroError) -> list[GeneratedToken]:
    raise error


def states_of(tokens: Sequence[PendingToken]) -> Tensor:
    """Return the tokens' hidden states (m, hidden). Every token must have passed at least one layer."""
    hidden = stacked(tokens)
    assert hidden is not None, "they have passed a layer"
    return hidden
