"""The model that a draft head learns from: its tokens, its continuations and its states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hetero_ee import Engine, ModelSpec, SamplingParams
from hetero_ee.decoding.sampling import choose_token
from hetero_ee.kv.batch import Batch
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.text.tokenizer import Tokenizer

EMBEDDING, HEAD = "embedding.tokens", "head.tokens"


@dataclass(frozen=True)
class Trace:
    """One sequence: token_ids (n,), the model's final normed state at each, (n, hidden), and those captured."""

    token_ids: Tensor
    states: Tensor
    captured: tuple[Tensor, ...] = ()

    @property
    def seen(self) -> Tensor:
        """The head's inputs: (n, captured x hidden), or the final states if none were captured."""
        return torch.cat(self.captured, 1) if self.captured else self.states

    def half(self) -> Trace:
        """Return a copy in half precision."""
        return Trace(self.token_ids, self.states.half(), tuple(each.half() for each in self.captured))


class Teacher:
    """folder: the model's, as the engine takes it. embedding, head: fp32 (vocab, hidden)."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.executor: Executor = engine.executor
        self.spec: ModelSpec = engine.spec
        self.quantizer = engine.quantizer
        tokenizer = Tokenizer.load(folder, self.spec.vocab_size)
        self._encode, self._end = tokenizer.encode, tokenizer.eos_token_id
        matrices = self.executor.weights.matrices
        self.embedding = matrices[EMBEDDING].dequantize()
        self.head = self.embedding if HEAD not in matrices else matrices[HEAD].dequantize()

    def encoded(self, text: str, n_tokens: int) -> list[int]:
        """The first tokens of a text and of what ends it."""
        ids = self._encode(text)
        return (ids if self._end is None else [*ids, self._end])[:n_tokens]

    def trace(self, token_ids: list[int]) -> Trace:
        """One pass of the model."""
        sequence = self.executor.cache.open_new()
        try:
            hidden = self.executor.hidden(Batch.of_sequence(sequence, 0, token_ids))
            captured = self.executor.captured
            return Trace(torch.tensor(token_ids), self.executor.final_norm(hidden), captured)
        finally:
            self.executor.cache.close(sequence)

    def continued(
        self, beginnings: Sequence[list[int]], n_tokens: int, params: Sequence[SamplingParams]
    ) -> list[list[int]]:
        """The beginnings with up to n_tokens more, in one batch; the first goes by params[0], the next by params[1]."""
        whole = [list(tokens) for tokens in beginnings]
        numbers = [self.executor.cache.open_new() for _ in whole]
        pending = {i: Batch.of_sequence(numbers[i], 0, tokens) for i, tokens in enumerate(whole)}
        for _ in range(n_tokens):
            ends = torch.tensor([len(rows) for rows in pending.values()]).cumsum(0)
            logits = self.executor.logits(Batch.joined(list(pending.values())), (ends - 1).tolist())
            for i, line in zip(list(pending), logits, strict=True):
                tokens = whole[i]
                tokens.append(choose_token(line, tokens, params[i % len(params)], i, len(tokens)))
                pending[i] = Batch.of_sequence(numbers[i], len(tokens) - 1, tokens[-1:])
                if tokens[-1] == self._end:
                    del pending[i]
            if not pending:
                break
        for number in numbers:
            self.executor.cache.close(number)
        return whole
