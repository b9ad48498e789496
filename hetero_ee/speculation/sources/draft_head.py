"""DraftHeadSource: chains of tokens from a draft head, which knows the model's last verified states.

Row i of a sequence joins the state at position i with the token at i + 1, and guesses the state at i + 1. Batch of
verified states keep their keys and values; those of a chain, whose states are guesses, are forgotten when it ends.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.batch import Batch
from hetero_ee.speculation.sources.candidates import ABSENT, ChainJudge, Choose, spread_out
from hetero_ee.speculation.sources.draft_head_layer import DraftHeadLayer

CHUNK_ROWS = 256  # of a prompt, caught up with together
FIRST_ROOM_TOKENS = 256
NOT_FINITE = "the draft head computed values that are no numbers; decoding goes on without its drafts there."


class Target(Protocol):
    """What the head needs of its model: an executor."""

    @property
    def spec(self) -> ModelSpec: ...

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor: ...

    def lm_head(self, normed: Tensor) -> Tensor: ...

    def lm_head_on_cpu(self, normed: Tensor) -> Tensor: ...


@dataclass(slots=True)
class _Sequence:
    """slot: its number in the head's cache. first: position of the first verified token held. token_ids, states: of
    verified positions, states in the first rows of (capacity, hidden). inputs: the token that each row in the cache was
    computed with; tip: what the last of them guessed, (1, hidden), None where it has to be computed again; drafted: the
    newest guess of the chain under way; is_blind: whether states were observed behind these that can't be used."""

    slot: int
    first: int
    states: Tensor
    token_ids: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    tip: Tensor | None = None
    drafted: Tensor | None = None
    is_blind: bool = False

    @property
    def end(self) -> int:
        """The first position not verified."""
        return self.first + len(self.token_ids)


class DraftHeadSource:
    """A DraftSource. warn: told once where anything is not finite; what depends on it is then not drafted.

    Takes (2 x key-value size + hidden size) x 4 bytes a token. draft_token_ids: of the layer's logits, None for all.
    on_gpu: where the layer computes, and so its logits; on the CPU, verified states come with the model's logits.
    """

    def __init__(
        self,
        layer: DraftHeadLayer,
        target: Target,
        draft_token_ids: Tensor | None = None,
        warn: Callable[[str], None] | None = None,
        *,
        on_gpu: bool = False,
    ) -> None:
        self._project = target.lm_head if on_gpu else target.lm_head_on_cpu
        self._layer, self._target, self._draft_token_ids = layer, target, draft_token_ids
        self._warn, self._has_warned = warn, False
        self._sequences: dict[int, _Sequence] = {}

    @torch.inference_mode()
    def propose(
        self, sequence: int, token_ids: Sequence[int], n_tokens: int, choose: Choose, judge: ChainJudge | None = None
    ) -> list[int]:
        """See DraftSource.propose. Empty unless the state before the newest token was observed."""
        held = self._known(sequence, token_ids)
        if held is None or n_tokens < 1:
            return []
        history = list(token_ids)
        try:
            logits = self._logits_behind(held, history[held.end :])
            while logits is not None:
                history.append(choose(logits, history))
                if len(history) == len(token_ids) + n_tokens or (judge is not None and not judge.goes_on()):
                    break
                logits = self._logits_after(held, history[-1])
        finally:
            self._layer.cache.truncate(held.slot, len(held.inputs))
        return history[len(token_ids) :]

    @torch.inference_mode()
    def candidates(self, sequence: int, token_ids: Sequence[int], k: int) -> list[int]:
        """See DraftSource.candidates."""
        held = self._known(sequence, token_ids)
        if held is None or k < 1:
            return []
        try:
            logits = self._logits_behind(held, list(token_ids[held.end :]))
        finally:
            self._layer.cache.truncate(held.slot, len(held.inputs))
        if logits is None:
            return []
        values, found = logits.topk(min(k, len(logits)))
        return [int(token) for token in found[values > ABSENT]]

    def observe(self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor) -> None:
        """See DraftSource.observe. Batch already held are replaced; behind a gap, what is held is dropped."""
        held = self._sequences.get(sequence)
        if held is not None and held.first <= first_position <= held.end:
            self.truncate(sequence, first_position)
        else:
            self.close(sequence)
            held = self._opened(sequence, first_position)
        n_rows = _finite_rows(normed)
        if n_rows < len(normed):
            self._warn_once()
            held.is_blind = True
        n_held = len(held.token_ids)
        held.states = _with_room(held.states, n_held, n_held + n_rows)
        held.states[n_held : n_held + n_rows] = normed[:n_rows]
        held.token_ids += token_ids[:n_rows]

    def truncate(self, sequence: int, length: int) -> None:
        """See DraftSource.truncate."""
        held = self._sequences.get(sequence)
        if held is None:
            return
        n_kept = max(0, length - held.first)
        held.is_blind = held.is_blind and length > held.end
        del held.token_ids[n_kept:]
        self._forget_rows(held, n_kept)

    def close(self, sequence: int) -> None:
        """See DraftSource.close."""
        held = self._sequences.pop(sequence, None)
        if held is not None:
            self._layer.cache.close(held.slot)

    def _opened(self, sequence: int, first_position: int) -> _Sequence:
        states = torch.empty(0, self._target.spec.hidden_size)
        self._sequences[sequence] = held = _Sequence(self._layer.cache.open_new(), first_position, states)
        return held

    def _known(self, sequence: int, token_ids: Sequence[int]) -> _Sequence | None:
        """The sequence, where everything before the newest token is known, or drafted behind what is."""
        held = self._sequences.get(sequence)
        if held is None or held.is_blind or not held.token_ids or len(token_ids) <= held.end:
            return None
        return held

    def _logits_behind(self, held: _Sequence, unverified: list[int]) -> Tensor | None:
        """(vocab,) behind the verified tokens and these: the newest, then drafts. None where the head can't say."""
        self._catch_up(held, unverified[0])
        held.drafted = held.tip
        logits = self._logits(held)
        for token in unverified[1:]:
            logits = None if logits is None else self._logits_after(held, token)
        return logits

    def _logits_after(self, held: _Sequence, token: int) -> Tensor | None:
        """The same after one more drafted token, its state the head's own guess."""
        assert held.drafted is not None
        if self._layer.cache.length(held.slot) == self._layer.cache.max_tokens:
            return None
        held.drafted = self._guessed(held.slot, [token], held.drafted)
        return self._logits(held)

    def _catch_up(self, held: _Sequence, newest: int) -> None:
        """Computes the rows of all verified states, the last with the newest token.

        Rows may have been computed with another one, since truncate() cuts before the last row's token.
        """
        inputs = [*held.token_ids[1:], newest]
        if held.inputs != inputs[: len(held.inputs)]:
            same = (mine == theirs for mine, theirs in zip(held.inputs, inputs, strict=False))
            self._forget_rows(held, sum(itertools.takewhile(bool, same)))
        if len(held.inputs) == len(inputs) and held.tip is None:
            self._forget_rows(held, len(inputs) - 1)
        for first in range(len(held.inputs), len(inputs), CHUNK_ROWS):
            tokens = inputs[first : first + CHUNK_ROWS]
            held.tip = self._guessed(held.slot, tokens, held.states[first : first + len(tokens)])[-1:].clone()
            held.inputs += tokens

    def _forget_rows(self, held: _Sequence, n_kept: int) -> None:
        """Keeps the first rows of the cache; what the last of them guessed is computed again when it is asked for."""
        if n_kept < len(held.inputs):
            del held.inputs[n_kept:]
            held.tip = None
            self._layer.cache.truncate(held.slot, n_kept)

    def _guessed(self, slot: int, token_ids: list[int], states: Tensor) -> Tensor:
        """The next states (m, hidden) behind the rows that the cache holds."""
        batch = Batch.of_sequence(slot, self._layer.cache.length(slot), token_ids)
        embedded = self._layer.embed(token_ids)
        if embedded is None:
            embedded = self._target.run(batch, None, range(0))
        return self._layer.guess(embedded, states, batch)

    def _logits(self, held: _Sequence) -> Tensor | None:
        """Of the chain's newest guess, over the whole vocabulary; None where a number is none."""
        assert held.drafted is not None
        logits = self._layer.logits(held.drafted)
        if logits is None:
            logits = self._project(held.drafted)
        # A sum shows a NaN or an infinity too, in an eighth of the time of looking at each number.
        if not math.isfinite(held.drafted.sum().item() + logits.sum().item()):
            self._warn_once()
            return None
        if self._draft_token_ids is None:
            return logits[0]
        return spread_out(logits[0], self._draft_token_ids, self._target.spec.vocab_size)

    def _warn_once(self) -> None:
        if self._warn and not self._has_warned:
            self._warn(NOT_FINITE)
        self._has_warned = True


def _finite_rows(states: Tensor) -> int:
    """How many rows come before the first with a NaN or an infinity, which a sum shows too, in less time."""
    if math.isfinite(states.sum().item()):
        return len(states)
    finite = torch.isfinite(states).all(1)
    return len(finite) if finite.all() else int((~finite).nonzero()[0])


def _with_room(states: Tensor, n_held: int, n_rows: int) -> Tensor:
    """The same rows with room for n_rows, doubling so that copying stays cheap."""
    if n_rows <= len(states):
        return states
    grown = torch.empty(max(2 * len(states), FIRST_ROOM_TOKENS, n_rows), states.shape[1])
    grown[:n_held] = states[:n_held]
    return grown
