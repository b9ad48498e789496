"""Early-exit decoding: a token that exits is given out there, unverified, and the layers behind are not waited for.

A step takes the last token of every text through the layers. Where the policy judges it, it may exit: what follows it
is chosen there, and it stays pending: it catches up with a later token that goes deeper. This is exact, and cheaper
than making up its keys and values (docs/exit_modes_results.md). What no exit takes passes every layer and is what
full.py would choose. Source: SpecEE (arXiv 2504.08850) for the exits, EE-LLM (arXiv 2312.04916) for catching up.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from hetero_ee.decoding.result import EXIT, GeneratedToken, TokenOrigin
from hetero_ee.decoding.texts import Ending, Prompts, Text, in_own_sequences, prefill, step, taken, texts_of
from hetero_ee.errors import UsageError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.executors.executor import Executor
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


class Passed(NamedTuple):
    """A text's last token, at the end of its way."""

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
    """Yields the tokens of all prompts as they come; counts: counts them. Closing the iterator frees the memory.

    Raises UsageError for sampling that the policy can't judge.
    """
    texts = texts_of(prompts, params, decode, ending, clock())
    steps = ExitSteps(executor, DraftSampler(), exits, counts or ExitCounts())
    tokens = _tokens(steps, texts, clock)
    closing = [] if exits.candidates is None else [exits.candidates.close]
    yield from in_own_sequences(executor, texts, tokens, *closing)


def _tokens(steps: "ExitSteps", texts: list[Text], clock: Callable[[], float]) -> Iterator[GeneratedToken]:
    """The rest of each prompt and a token of each, by all layers, then steps."""
    try:
        logits_of = [steps.read_prompt(text) for text in texts]
        for text, logits in zip(texts, logits_of, strict=True):
            yield step(text, logits, clock())
        while active := [text for text in texts if not text.finished]:
            for passed in steps.run(active):
                if passed.logits is not None:
                    yield step(passed.text, passed.logits, clock())
                elif passed.token_id is not None:
                    token = taken(passed.text, passed.token_id, clock())
                    yield replace(token, origin=TokenOrigin(EXIT, passed.depth))
    finally:
        steps.end(texts)


def score_early(
    executor: Executor, token_ids: Sequence[int], n_prompt_tokens: int, exits: EarlyExits, counts: ExitCounts
) -> Iterator[tuple[Tensor, int]]:
    """What this text's tokens after its prompt would have been chosen from, with the keys and values that the mode
    leaves behind: logits (vocab,) and the layers passed, for each. Raises UsageError for a text without a prompt."""
    if not 0 < n_prompt_tokens < len(token_ids):
        raise UsageError(f"a text of {len(token_ids)} tokens has no {n_prompt_tokens} of prompt and some to score.")
    params = SamplingParams(max_new_tokens=len(token_ids) - n_prompt_tokens)  # policies go by how far a text is
    ending = Ending(frozenset(), executor.cache.max_tokens)
    prompt_ids, sequence = list(token_ids[:n_prompt_tokens]), executor.cache.open_new()
    text = Text.of_prompt(0, prompt_ids, params, ending, lambda ids: "", sequence)
    steps = ExitSteps(executor, DraftSampler(), exits, counts)
    try:
        yield steps.read_prompt(text), executor.spec.n_layers
        for token_id in token_ids[n_prompt_tokens:-1]:
            text.token_ids.append(token_id)
            for passed in steps.run([text]):
                logits = (
                    steps.judge.logits(passed.depth, passed.hidden[None])[0] if passed.logits is None else passed.logits
                )
                yield logits, passed.depth
    finally:
        executor.cache.close(text.cached_as)
        if exits.candidates is not None:
            exits.candidates.close(text.cached_as)


class ExitSteps:
    """One call's texts, step by step."""

    def __init__(self, executor: Executor, sampler: DraftSampler, exits: EarlyExits, counts: ExitCounts) -> None:
        self._executor, self._exits, self._counts = executor, exits, counts
        self.judge = exits.policy.judging(executor, sampler)
        self._sampler = sampler
        self._waiting: dict[int, list[WaitingToken]] = {}  # by Text.sequence: its last token and those before that wait
        self._audited: dict[int, list[tuple[WaitingToken, int]]] = {}  # of these, with what was given out after them

    def read_prompt(self, text: Text) -> Tensor:
        """By all layers: logits (vocab,) of its last token. Raises UsageError for sampling that can't be judged."""
        self.judge.begin(text)
        candidates = self._exits.candidates
        return prefill(self._executor, text, None if candidates is None else candidates.read_prompt)

    def run(self, texts: Sequence[Text]) -> Iterator[Passed]:
        """The last token of every text on its way out, each as soon as it is there; what follows it is the caller's to
        add. A text that ends meanwhile may lose its sequence of the cache."""
        layers_of = {text.sequence: self._exit_layers(text) for text in texts}
        going = list(texts)
        for text in texts:
            last = WaitingToken(text.token_ids[-1], text.cached_as, len(text.token_ids) - 1)
            self._waiting.setdefault(text.sequence, []).append(last)
        depth = 0
        for exit_layer in sorted({layer for layers in layers_of.values() for layer in layers}):
            asked = [text for text in going if exit_layer in layers_of[text.sequence]]
            if asked:
                depth = exit_layer
                self._advance(going, exit_layer)
                exited = [passed for passed in self._judged(exit_layer, asked) if passed.token_id is not None]
                going = [text for text in going if all(text is not passed.text for passed in exited)]
                yield from map(self._ended, exited)
        self._counts.add_step(self._executor.spec.n_layers if going else depth)
        yield from map(self._ended, self._all_layers(going))

    def end(self, texts: Sequence[Text]) -> None:
        """No token of these texts follows: nothing waits any more, and what the cache holds of them is whole."""
        cache = self._executor.cache
        for text in texts:
            self._waiting.pop(text.sequence, None)
            self._audited.pop(text.sequence, None)
            if text.cached_as in cache.sequences:
                cache.cut(text.cached_as, cache.length(text.cached_as))

    def _exit_layers(self, text: Text) -> Sequence[int]:
        """None for a token that many others wait for."""
        is_breached = self._exits.audit is not None and self._exits.audit.is_breached
        if is_breached or len(self._waiting.get(text.sequence, ())) >= self._exits.max_waiting:
            return ()
        return self.judge.exit_layers(text)

    def _advance(self, texts: Sequence[Text], to_layer: int) -> None:
        advance(self._executor, [token for text in texts for token in self._waiting[text.sequence]], to_layer)

    def _judged(self, exit_layer: int, texts: Sequence[Text]) -> list[Passed]:
        hidden = _states([self._waiting[text.sequence][-1] for text in texts])
        self._counts.n_judged[exit_layer] += len(texts)
        chosen = self.judge.judge(exit_layer, hidden, texts)
        rows = zip(texts, hidden.unbind(), chosen, strict=True)
        return [Passed(text, exit_layer, state, token_id, None) for text, state, token_id in rows]

    def _all_layers(self, texts: Sequence[Text]) -> list[Passed]:
        """These texts' tokens, and all that wait for them, through the rest of the layers."""
        if not texts:
            return []
        n_layers = self._executor.spec.n_layers
        self._advance(texts, n_layers)
        audited = [(text, *each) for text in texts for each in self._audited.pop(text.sequence, ())]
        last = [self._waiting[text.sequence][-1] for text in texts]
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
        """Count the token. One that exited waits for a later one that goes deeper."""
        text, waiting = passed.text, self._waiting[passed.text.sequence]
        if passed.token_id is not None and self._exits.audit is not None:
            token = waiting[-1]
            if is_audited(text.params.seed, text.sequence, token.position):
                self._audited.setdefault(text.sequence, []).append((token, passed.token_id))
        if passed.logits is not None:
            waiting.clear()
        self._counts.add_token(passed.depth)
        self.judge.given_out(text, passed.depth, passed.hidden)
        return passed


def _states(tokens: Sequence[WaitingToken]) -> Tensor:
    """(m, hidden) of tokens that have passed a layer."""
    hidden = stacked(tokens)
    assert hidden is not None, "they have passed a layer"
    return hidden
