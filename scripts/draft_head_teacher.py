"""The model that a draft head learns from: its tokens, its continuations and its states."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetero_ee import Engine, ModelSpec, SamplingParams
from hetero_ee.decoding.sampling import choose_token
from hetero_ee.kv.batch import Batch
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.text.chat_prompt import chat_ids, open_template
from hetero_ee.text.chat_template import Message

EMBEDDING, HEAD = "embedding.tokens", "head.tokens"


@dataclass(frozen=True)
class Trace:
    """One sequence: token_ids (n,), the model's final normed state at each, (n, hidden), and those captured."""

    token_ids: Tensor
    states: Tensor
    captured: tuple[Tensor, ...] = ()
    first: int = 0  # number of the first token whose state a head learns to guess; those before it are the prompt's

    @property
    def n_learned(self) -> int:
        return len(self.token_ids) - self.first

    @property
    def seen(self) -> Tensor:
        """The head's inputs: (n, captured x hidden), or the final states if none were captured."""
        return torch.cat(self.captured, 1) if self.captured else self.states

    def half(self) -> Trace:
        """Return a copy in half precision."""
        return replace(self, states=self.states.half(), captured=tuple(each.half() for each in self.captured))


class Teacher:
    """An opened model. embedding, head: fp32 (vocab, hidden)."""

    def __init__(self, engine: Engine) -> None:
        self.executor: Executor = engine.executor
        self.spec: ModelSpec = engine.spec
        self.quantizer = engine.quantizer
        tokenizer = engine.tokenizer
        self._tokenizer, self._encode, self._end = tokenizer, tokenizer.encode, tokenizer.eos_token_id
        self._template = open_template(tokenizer, None) if engine.has_chat_template else None
        matrices = self.executor.weights.matrices
        self.embedding = matrices[EMBEDDING].dequantize()
        self.head = self.embedding if HEAD not in matrices else matrices[HEAD].dequantize()

    def last_ffn(self) -> dict[str, Tensor]:
        """Return the last layer's FFN and its norm by the names of a training head's parameters, fp32."""
        weights, prefix = self.executor.weights, f"layers.{self.spec.n_layers - 1}.ffn"
        gate, up = weights.matrices[f"{prefix}.gate_up"].dequantize().chunk(2)
        down, norm = weights.matrices[f"{prefix}.down"].dequantize(), weights.vectors[f"{prefix}.norm"]
        return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down, "norm": norm}

    def final_scale(self) -> Tensor:
        """Return the weights of the final norm, (hidden,)."""
        return self.executor.weights.vectors["final_norm.norm"]

    def encoded(self, text: str, n_tokens: int) -> list[int]:
        """The first tokens of a text and of what ends it."""
        ids = self._encode(text)
        return (ids if self._end is None else [*ids, self._end])[:n_tokens]

    def replied(self, prompt: str) -> list[int]:
        """Return the token ids of a user's message up to the beginning of the reply, by the model's chat template."""
        if self._template is None:
            return self._encode(prompt)
        return chat_ids(self._template, self._tokenizer, [Message("user", prompt)])

    def trace(self, token_ids: list[int]) -> Trace:
        """One pass of the model."""
        sequence = self.executor.cache.open_new()
        try:
            hidden = self.executor.hidden(Batch.of_sequence(sequence, 0, token_ids))
            captured = self.executor.captured
            return Trace(torch.tensor(token_ids), self.executor.final_norm(hidden), captured).half()
        finally:
            self.executor.cache.close(sequence)

    def continued(
        self, prompts: Iterable[list[int]], n_tokens: int, params: Sequence[SamplingParams], n_together: int = 64
    ) -> Iterator[tuple[int, Trace]]:
        """Continue each prompt by up to `n_tokens`, `n_together` at a time.

        Yields: A prompt's number and the trace of it with its continuation, in the order in which they end. The last
            token of a continuation has no state yet, so the trace leaves it out.

        Args:
            params: Prompt number i is sampled by params[i % len(params)].
        """
        waiting, running = enumerate(prompts), dict[int, _Continuation]()
        try:
            yield from self._continued(waiting, running, params, n_tokens, n_together)
        finally:
            for each in running.values():
                self.executor.cache.close(each.sequence)

    def _continued(
        self,
        waiting: Iterator[tuple[int, list[int]]],
        running: dict[int, _Continuation],
        params: Sequence[SamplingParams],
        n_tokens: int,
        n_together: int,
    ) -> Iterator[tuple[int, Trace]]:
        while True:
            for number, tokens in itertools.islice(waiting, n_together - len(running)):
                running[number] = begun = _Continuation(list(tokens), len(tokens) + n_tokens, self.executor)
                self._advance({number: begun}, params)
            for number in [number for number, each in running.items() if each.has_ended(self._end)]:
                ended = running.pop(number)
                self.executor.cache.close(ended.sequence)
                yield number, ended.trace()
            if running:
                self._advance(running, params)
            elif not (following := list(itertools.islice(waiting, 1))):
                return
            else:
                waiting = itertools.chain(following, waiting)

    def _advance(self, running: Mapping[int, _Continuation], params: Sequence[SamplingParams]) -> None:
        """Pass the tokens of these sequences that have no states yet, and choose the next token of each."""
        batch = Batch.joined([each.pending() for each in running.values()])
        normed = self.executor.final_norm(self.executor.hidden(batch))
        rows = [normed, *self.executor.captured]
        counts = [len(each.tokens) - each.n_passed for each in running.values()]
        ends = torch.tensor(counts).cumsum(0) - 1
        logits = self.executor.lm_head(normed[ends])
        parts = zip(*(states.half().split(counts) for states in rows), strict=True)
        for (number, each), states, line in zip(running.items(), parts, logits, strict=True):
            each.states.append(torch.stack(states))
            each.n_passed = len(each.tokens)
            each.tokens.append(choose_token(line, each.tokens, params[number % len(params)], number, len(each.tokens)))


class _Continuation:
    """A prompt being continued: its tokens so far, and the states (1 + captured, n, hidden) of those passed."""

    def __init__(self, tokens: list[int], most_tokens: int, executor: Executor) -> None:
        self.tokens, self._most_tokens, self._first, self.n_passed = tokens, most_tokens, len(tokens), 0
        self.states: list[Tensor] = []
        self.sequence = executor.cache.open_new()

    def pending(self) -> Batch:
        return Batch.of_sequence(self.sequence, self.n_passed, self.tokens[self.n_passed :])

    def has_ended(self, end: int | None) -> bool:
        return self.n_passed > 0 and (self.tokens[-1] == end or len(self.tokens) >= self._most_tokens)

    def trace(self) -> Trace:
        normed, *captured = torch.cat(self.states, 1)
        return Trace(torch.tensor(self.tokens[: self.n_passed]), normed, tuple(captured), self._first)
