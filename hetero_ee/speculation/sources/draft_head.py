"""DraftHeadSource: draft sequences from a draft head, which knows the model's last verified states.

Token i of a sequence joins the state at position i with the token at i + 1, and predicts the state at i + 1. Keys and
values of verified states stay; those of drafts, whose states are predictions themselves, are forgotten when the draft
sequence ends. Source: EAGLE-1 (arXiv 2401.15077).
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.batch import Batch
from hetero_ee.speculation.sources.draft_head_layer import DraftHeadLayer
from hetero_ee.speculation.sources.source import Choose, Draft

CHUNK_TOKENS = 512  # computed together at most: a chunk of a prompt in most plans
FIRST_ROOM_TOKENS = 256
ABSENT = -1e30  # logit of a token that the head does not draft: finite, for what tempers, penalizes and adds it up
NOT_FINITE = "the draft head computed values that are not finite; decoding continues without its drafts there."


class Target(Protocol):
    """What the head needs of its model: an executor."""

    @property
    def spec(self) -> ModelSpec: ...

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor: ...

    def lm_head(self, normed: Tensor) -> Tensor: ...

    def lm_head_on_cpu(self, normed: Tensor) -> Tensor: ...


@dataclass(slots=True)
class _Sequence:
    """What the head holds of one sequence."""

    slot: int  # its number in the head's cache
    first: int  # position of the first verified token held
    states: Tensor  # (capacity, hidden), the first of them of verified positions
    token_ids: list[int] = field(default_factory=list)  # of verified positions
    inputs: list[int] = field(default_factory=list)  # the token that each position in the cache was computed with
    tip: Tensor | None = None  # (1, hidden) predicted by the last of them; None where it has to be computed again
    drafted: Tensor | None = None  # the newest prediction of the draft sequence under way
    is_blind: bool = False  # whether states were observed after these that can't be used

    @property
    def end(self) -> int:
        """The first position not verified."""
        return self.first + len(self.token_ids)


class DraftHeadSource:
    """A DraftSource that computes; takes (2 x key-value size + hidden size) x 4 bytes a token."""

    name = "draft head"
    is_free = False

    def __init__(
        self,
        layer: DraftHeadLayer,
        target: Target,
        draft_token_ids: Tensor | None = None,
        warn: Callable[[str], None] | None = None,
        *,
        on_gpu: bool = False,
        draft_s: float = 0.0,
    ) -> None:
        """draft_token_ids: of the layer's logits, None for all. warn: told once where anything is not finite; what
        depends on it is then not drafted. on_gpu: where the layer and its logits are computed."""
        self._lm_head = target.lm_head if on_gpu else target.lm_head_on_cpu
        self._layer, self._target, self._draft_token_ids = layer, target, draft_token_ids
        self._warn, self._has_warned = warn, False
        self._sequences: dict[int, _Sequence] = {}
        self.draft_s = draft_s

    @torch.inference_mode()
    def drafts(self, sequence: int, token_ids: Sequence[int], choose: Choose) -> Generator[Draft]:
        """See DraftSource.drafts. None unless the state before the newest token was observed."""
        held = self._known(sequence, token_ids)
        if held is None:
            return
        history = list(token_ids)
        try:
            logits = self._logits_after_all(held, history[held.end :])
            while logits is not None:
                token_id = choose(logits, history)
                if token_id is None:
                    return
                history.append(token_id)
                yield Draft(token_id, torch.softmax(logits, 0)[token_id].item())
                logits = self._logits_after(held, token_id)
        finally:
            self._layer.cache.truncate(held.slot, len(held.inputs))

    def observe(self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor) -> None:
        """See DraftSource.observe. Tokens already held are replaced; after a gap, what is held is dropped."""
        held = self._sequences.get(sequence)
        if held is not None and held.first <= first_position <= held.end:
            self.truncate(sequence, first_position)
        else:
            self.close(sequence)
            held = self._opened(sequence, first_position)
        n_finite = _n_finite(normed)
        if n_finite < len(normed):
            self._warn_once()
            held.is_blind = True
        n_held = len(held.token_ids)
        held.states = _with_room(held.states, n_held, n_held + n_finite)
        held.states[n_held : n_held + n_finite] = normed[:n_finite]
        held.token_ids += token_ids[:n_finite]

    def read_prompt(self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor) -> None:
        """See DraftSource.read_prompt. The last position waits for the token after it."""
        self.observe(sequence, first_position, token_ids, normed)
        held = self._sequences[sequence]
        if held.end <= self._layer.cache.max_tokens:
            try:
                self._catch_up(held)
            finally:
                self._layer.cache.truncate(held.slot, len(held.inputs))

    def truncate(self, sequence: int, length: int) -> None:
        """See DraftSource.truncate."""
        held = self._sequences.get(sequence)
        if held is None:
            return
        n_kept = max(0, length - held.first)
        held.is_blind = held.is_blind and length > held.end
        del held.token_ids[n_kept:]
        self._forget(held, n_kept)

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
        """The sequence, where everything before the newest token is known, or drafted after what is."""
        held = self._sequences.get(sequence)
        if held is None or held.is_blind or not held.token_ids or len(token_ids) <= held.end:
            return None
        return held if held.end <= self._layer.cache.max_tokens else None

    def _logits_after_all(self, held: _Sequence, unverified: list[int]) -> Tensor | None:
        """(vocab,) after the verified tokens and these: the newest, then drafts. None where the head can't say."""
        self._catch_up(held, unverified[0])
        held.drafted = held.tip
        logits = self._logits(held)
        for token in unverified[1:]:
            logits = None if logits is None else self._logits_after(held, token)
        return logits

    def _logits_after(self, held: _Sequence, token: int) -> Tensor | None:
        """The same after one more drafted token, its state the head's own prediction."""
        assert held.drafted is not None
        if self._layer.cache.length(held.slot) == self._layer.cache.max_tokens:
            return None
        held.drafted = self._predicted(held.slot, [token], held.drafted)
        return self._logits(held)

    @torch.inference_mode()
    def _catch_up(self, held: _Sequence, *newest: int) -> None:
        """Computes the verified positions, the last of them with the newest token, or not where that is not there yet.

        What is computed of the last may have been with another one, since truncate() cuts before its position's token.
        """
        following = [*held.token_ids[len(held.inputs) :], *newest]  # the last input, then those to be computed
        if (
            held.inputs
            and following
            and (following[0] != held.inputs[-1] or (held.tip is None and len(following) == 1))
        ):
            self._forget(held, len(held.inputs) - 1)
            following.insert(0, held.token_ids[len(held.inputs)])
        for start in range(1, len(following), CHUNK_TOKENS):
            tokens, first = following[start : start + CHUNK_TOKENS], len(held.inputs)
            held.tip = self._predicted(held.slot, tokens, held.states[first : first + len(tokens)])[-1:].clone()
            held.inputs += tokens

    def _forget(self, held: _Sequence, n_kept: int) -> None:
        """Keeps the first positions of the cache; what the last of them predicted is computed again when it is asked
        for."""
        if n_kept < len(held.inputs):
            del held.inputs[n_kept:]
            held.tip = None
            self._layer.cache.truncate(held.slot, n_kept)

    def _predicted(self, slot: int, token_ids: list[int], states: Tensor) -> Tensor:
        """The next states (m, hidden) after the positions that the cache holds."""
        batch = Batch.of_sequence(slot, self._layer.cache.length(slot), token_ids)
        embedded = self._layer.embed(token_ids)
        if embedded is None:
            embedded = self._target.run(batch, None, range(0))
        return self._layer.guess(embedded, states, batch)

    def _logits(self, held: _Sequence) -> Tensor | None:
        """Of the newest prediction, over the whole vocabulary; None where a number is not finite."""
        assert held.drafted is not None
        logits = self._layer.logits(held.drafted)
        if logits is None:
            logits = self._lm_head(held.drafted)
        # A sum shows a NaN or an infinity too, in an eighth of the time of looking at each number.
        if not math.isfinite(held.drafted.sum().item() + logits.sum().item()):
            self._warn_once()
            return None
        if self._draft_token_ids is None:
            return logits[0]
        whole = torch.full((self._target.spec.vocab_size,), ABSENT)
        return whole.index_copy_(0, self._draft_token_ids, logits[0])

    def _warn_once(self) -> None:
        if self._warn and not self._has_warned:
            self._warn(NOT_FINITE)
        self._has_warned = True


def _n_finite(states: Tensor) -> int:
    """How many states come before the first with a NaN or an infinity, which a sum shows too, in less time."""
    if math.isfinite(states.sum().item()):
        return len(states)
    finite = torch.isfinite(states).all(1)
    return len(finite) if finite.all() else int((~finite).nonzero()[0])


def _with_room(states: Tensor, n_held: int, n_wanted: int) -> Tensor:
    """The same states with room for n_wanted, doubling so that copying stays cheap."""
    if n_wanted <= len(states):
        return states
    grown = torch.empty(max(2 * len(states), FIRST_ROOM_TOKENS, n_wanted), states.shape[1])
    grown[:n_held] = states[:n_held]
    return grown
