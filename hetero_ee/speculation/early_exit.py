"""Early-exit decoding: a token that exits is given out there, unverified, and the layers behind are not waited for.

A step takes the last token of every text through the layers. Where the policy judges it, it may exit: what follows it
is chosen there, and it stays pending: it catches up with a later token that goes deeper. This is exact, and cheaper
than making up its keys and values (docs/exit_modes_results.md). What no exit takes passes every layer and is what
full.py would choose. Source: SpecEE (arXiv 2504.08850) for the exits, EE-LLM (arXiv 2312.04916) for catching up.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from hetero_ee.decoding.loop import Take, generate
from hetero_ee.decoding.result import EXIT, GeneratedToken, TokenOrigin
from hetero_ee.decoding.texts import Ending, Prompts, Text, prefill, step, taken
from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.executors.executor import Executor, Observe
from hetero_ee.speculation.audit import ExitAudit, is_audited
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.exit_statistics import ExitCounts
from hetero_ee.speculation.policies.draft_candidates import DraftCandidates
from hetero_ee.speculation.policies.policy import ExitPolicy
from hetero_ee.speculation.waiting import WaitingToken, advance, stacked
from hetero_ee.text.text_stream import Decode


@dataclass(frozen=True, slots=True)
class EarlyExits:
    """How tokens exit, and what becomes of the layers that they skip."""

    policy: ExitPolicy
    max_waiting: int  # tokens of one text that may wait; the next one passes every layer
    candidates: DraftCandidates | None = None  # the policy's, which read the prompts too
    audit: ExitAudit | None = None  # compares some exits with the full model; once it is breached nothing exits
    warn: Callable[[str], None] | None = None  # told of a breach

    def close(self, sequence: int) -> None:
        """Free what the draft head keeps of a sequence of the KV cache."""
        if self.candidates is not None:
            self.candidates.close(sequence)


class Passed(NamedTuple):
    """A sequence's last token, after the layers that it passed in a step."""

    text: Text
    depth: int  # layers passed
    hidden: Tensor  # (hidden,) after them
    token_id: int | None  # that follows, chosen at an exit; None where all layers were passed
    logits: Tensor | None  # (vocab,) of those that passed all layers


def generate_early(
    executor: Executor,
    prompts: Prompts,
    params: SamplingParams,
    ending: Ending,
    decode: Decode,
    clock: Callable[[], float],
    exits: EarlyExits,
    counts: ExitCounts | None = None,
) -> Iterator[GeneratedToken]:
    """Yield the tokens of all prompts as they come, and count them in `counts`.

    Raises UsageError for sampling that the policy can't judge.
    """
    mode = EarlyExitMode(executor, exits, counts or ExitCounts(), clock)
    return generate(executor, prompts, params, ending, decode, clock, mode)


def score_early(
    executor: Executor, token_ids: Sequence[int], n_prompt_tokens: int, exits: EarlyExits, counts: ExitCounts
) -> Iterator[tuple[Tensor, int]]:
    """Yield what each token after the prompt would have been chosen from: logits (vocab,), and the layers passed.

    The keys and values are those that the mode leaves behind. Raises UsageError for a sequence without a prompt.
    """
    if not 0 < n_prompt_tokens < len(token_ids):
        raise UsageError(f"a text of {len(token_ids)} tokens has no {n_prompt_tokens} of prompt and some to score.")
    params = SamplingParams(max_new_tokens=len(token_ids) - n_prompt_tokens)  # policies go by how far a text is
    ending = Ending(frozenset(), executor.cache.max_tokens)
    prompt_ids, sequence = list(token_ids[:n_prompt_tokens]), executor.cache.open_new()
    text = Text.of_prompt(0, prompt_ids, params, ending, lambda ids: "", sequence)
    mode = EarlyExitMode(executor, exits, counts, lambda: 0.0)
    try:
        mode.begin(text)
        yield prefill(executor, text, mode.observe), executor.spec.n_layers
        for token_id in token_ids[n_prompt_tokens:-1]:
            text.token_ids.append(token_id)
            for passed in mode.passed([text]):
                yield mode.logits(passed), passed.depth
    finally:
        executor.cache.close(sequence)
        mode.close(sequence)


class EarlyExitMode:
    """Sequences whose tokens are emitted at their exits. See Mode.

    The last tokens of all sequences take each step together. What a policy decides may depend on that: see SkipDecode.
    """

    def __init__(self, executor: Executor, exits: EarlyExits, counts: ExitCounts, clock: Callable[[], float]) -> None:
        self._executor, self._exits, self._counts, self._clock = executor, exits, counts, clock
        self._sampler = DraftSampler()
        self._judge = exits.policy.judging(executor, self._sampler)
        self._pending: dict[int, list[WaitingToken]] = {}  # by sequence: its last token and those before it that exited
        self._audited: dict[int, list[tuple[WaitingToken, int]]] = {}  # of these, with the token emitted after each
        self.observe: Observe | None = None if exits.candidates is None else exits.candidates.read_prompt

    def begin(self, text: Text) -> None:
        """See Mode."""
        self._judge.begin(text)

    def advance(self, texts: Sequence[Text]) -> list[Take]:
        """See Mode. A token counts as emitted when it exits, before other sequences pass deeper layers."""
        takes: dict[int, Take] = {}
        try:
            for passed in self.passed(texts):
                takes[passed.text.cached_as] = partial(list, [self._emitted(passed)])
        except HeteroError as error:
            if not takes:
                raise
            return [takes.get(text.cached_as, partial(_fail, error)) for text in texts]
        return [takes[text.cached_as] for text in texts]

    def leave(self, texts: Sequence[Text]) -> None:
        """Cut the cache to the tokens that have passed every layer. A later step catches up with the others."""
        cache = self._executor.cache
        for text in texts:
            self._pending.pop(text.cached_as, None)
            self._audited.pop(text.cached_as, None)
            if text.cached_as in cache.sequences:
                cache.cut(text.cached_as, cache.length(text.cached_as))

    def close(self, sequence: int) -> None:
        """See Mode."""
        self._exits.close(sequence)

    def logits(self, passed: Passed) -> Tensor:
        """Return what the token's successor is chosen from, (vocab,)."""
        return self._judge.logits(passed.depth, passed.hidden[None])[0] if passed.logits is None else passed.logits

    def passed(self, texts: Sequence[Text]) -> Iterator[Passed]:
        """Run the last token of every sequence until it exits, and yield each as soon as it has."""
        layers_of = {text.cached_as: self._exit_layers(text) for text in texts}
        going = list(texts)
        for text in texts:
            self._pending[text.cached_as] = [*self._pending_of(text), _token(text, len(text.token_ids) - 1)]
        depth = 0
        for exit_layer in sorted({layer for layers in layers_of.values() for layer in layers}):
            asked = [text for text in going if exit_layer in layers_of[text.cached_as]]
            if asked:
                depth = exit_layer
                self._advance(going, exit_layer)
                exited = [passed for passed in self._judged(exit_layer, asked) if passed.token_id is not None]
                going = [text for text in going if all(text is not passed.text for passed in exited)]
                yield from map(self._ended, exited)
        self._counts.add_step(self._executor.spec.n_layers if going else depth)
        yield from map(self._ended, self._all_layers(going))

    def _pending_of(self, text: Text) -> list[WaitingToken]:
        """The tokens before the last one that some layers lack."""
        if text.cached_as not in self._pending:
            n_whole = self._executor.cache.length(text.cached_as)
            self._pending[text.cached_as] = [_token(text, at) for at in range(n_whole, len(text.token_ids) - 1)]
        return self._pending[text.cached_as]

    def _exit_layers(self, text: Text) -> Sequence[int]:
        """Return no layer for a token that many others wait for."""
        is_breached = self._exits.audit is not None and self._exits.audit.is_breached
        if is_breached or len(self._pending_of(text)) >= self._exits.max_waiting:
            return ()
        return self._judge.exit_layers(text)

    def _advance(self, texts: Sequence[Text], to_layer: int) -> None:
        advance(self._executor, [token for text in texts for token in self._pending[text.cached_as]], to_layer)

    def _judged(self, exit_layer: int, texts: Sequence[Text]) -> list[Passed]:
        hidden = _states([self._pending[text.cached_as][-1] for text in texts])
        self._counts.n_judged[exit_layer] += len(texts)
        chosen = self._judge.judge(exit_layer, hidden, texts)
        rows = zip(texts, hidden.unbind(), chosen, strict=True)
        return [Passed(text, exit_layer, state, token_id, None) for text, state, token_id in rows]

    def _all_layers(self, texts: Sequence[Text]) -> list[Passed]:
        """Run these sequences' tokens, and all that are pending before them, through the remaining layers."""
        if not texts:
            return []
        n_layers = self._executor.spec.n_layers
        self._advance(texts, n_layers)
        audited = [(text, *each) for text in texts for each in self._audited.pop(text.cached_as, ())]
        last = [self._pending[text.cached_as][-1] for text in texts]
        hidden = _states([*last, *(token for _, token, _ in audited)])
        logits = self._executor.to_logits(hidden)
        self._audit(audited, logits[len(texts) :])
        rows = zip(texts, hidden.unbind(), logits.unbind(), strict=False)
        return [Passed(text, n_layers, state, None, row) for text, state, row in rows]

    def _audit(self, audited: Sequence[tuple[Text, WaitingToken, int]], logits: Tensor) -> None:
        """What was given out after these tokens, and what the full model would have chosen there: logits (m, vocab)."""
        for (text, token, token_id), row in zip(audited, logits, strict=True):
            audit, warn = self._exits.audit, self._exits.warn
            assert audit is not None, "there is something to audit"
            was_breached = audit.is_breached
            audit.observe(self._sampler.choose(text, text.token_ids[: token.position + 1], row) != token_id)
            if audit.is_breached and not was_breached and warn is not None:
                warn(
                    f"{audit.n_different} of {audit.n_audited} audited exits differ from the full model, more than was "
                    "certified: no token exits any more. These texts are unlike those of the certificate."
                )

    def _ended(self, passed: Passed) -> Passed:
        """Count the token. One that exited stays pending until a later one goes deeper."""
        text, pending = passed.text, self._pending[passed.text.cached_as]
        if passed.token_id is not None and self._exits.audit is not None:
            token = pending[-1]
            if is_audited(text.params.seed, text.sequence, token.position):
                self._audited.setdefault(text.cached_as, []).append((token, passed.token_id))
        if passed.logits is not None:
            pending.clear()
        self._counts.add_token(passed.depth)
        self._judge.given_out(text, passed.depth, passed.hidden)
        return passed

    def _emitted(self, passed: Passed) -> GeneratedToken:
        if passed.token_id is None:
            assert passed.logits is not None, "it passed all layers"
            return step(passed.text, passed.logits, self._clock())
        token = taken(passed.text, passed.token_id, self._clock())
        return replace(token, origin=TokenOrigin(EXIT, passed.depth))


def _fail(error: HeteroError) -> list[GeneratedToken]:
    raise error


def _token(text: Text, position: int) -> WaitingToken:
    return WaitingToken(text.token_ids[position], text.cached_as, position)


def _states(tokens: Sequence[WaitingToken]) -> Tensor:
    """(m, hidden) of tokens that have passed a layer."""
    hidden = stacked(tokens)
    assert hidden is not None, "they have passed a layer"
    return hidden
