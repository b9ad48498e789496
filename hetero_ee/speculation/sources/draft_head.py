"""Drafts from a draft head, which reads the model's last verified states.

The head combines the state at position i with the token at i + 1 and predicts the state at i + 1. Keys and values of
verified states stay. Those of drafts, whose states are predictions, are dropped when the draft sequence ends. Source:
EAGLE-1 (arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840).
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hetero_ee.kv.batch import Batch, path_of
from hetero_ee.runtime.devices.machine import BESIDE_ROWS
from hetero_ee.runtime.drafted import NO_TOKEN, DraftEnd, DraftVocabulary
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.sources.draft_head_layer import DraftHeadLayer
from hetero_ee.speculation.sources.source import Choose, ChooseSeveral, Draft, Levels

PIECE_ROWS = 256  # memory comes in such pieces, so that growing copies nothing
NOT_FINITE = "the draft head computed values that are not finite; decoding continues without its drafts there."


class StateRows:
    """Hidden states of one sequence's verified tokens: fp32 rows (hidden,) on the device that computed them."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []

    @torch.inference_mode()
    def put(self, first: int, rows: Tensor) -> None:
        """Write rows (m, hidden) from row `first` on, replacing existing ones. `first` must not leave a gap."""
        while rows.shape[0] and len(self._pieces) * PIECE_ROWS < first + len(rows):
            self._pieces.append(rows.new_empty(PIECE_ROWS, rows.shape[1]))
        for piece, inside, taken in self._places(first, first + len(rows)):
            piece[inside] = rows[taken]

    @torch.inference_mode()
    def rows(self, first: int, end: int) -> Tensor:
        """Return the rows `first` to `end` - 1, (end - first, hidden). They must exist."""
        found = [piece[inside] for piece, inside, _ in self._places(first, end)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _places(self, first: int, end: int) -> list[tuple[Tensor, slice, slice]]:
        """Return, for each piece of memory with some of these rows, the piece, their slice of it, and their slice of
        all rows."""
        found = []
        for number in range(first // PIECE_ROWS, -(-end // PIECE_ROWS)):
            start = number * PIECE_ROWS
            low, high = max(first, start), min(end, start + PIECE_ROWS)
            found.append((self._pieces[number], slice(low - start, high - start), slice(low - first, high - first)))
        return found


@dataclass(slots=True)
class _Sequence:
    """State of the draft head for one sequence."""

    layer: DraftHeadLayer  # the layer that computes this sequence
    slot: int  # number of the sequence in the layer's cache
    first: int  # position of the first verified token held
    states: StateRows = field(default_factory=StateRows)  # states of verified positions, on the layer's device
    token_ids: list[int] = field(default_factory=list)  # tokens of verified positions
    inputs: list[int] = field(default_factory=list)  # the token that each position in the cache was computed with
    tip: Tensor | None = None  # (1, hidden) predicted by the last of them; None if it has to be recomputed

    @property
    def end(self) -> int:
        return self.first + len(self.token_ids)

    def cut(self) -> None:
        """Cut the cache to verified inputs. A sequence that a change of plan has dropped has no cache."""
        if self.slot in self.layer.cache.sequences:
            self.layer.cache.truncate(self.slot, len(self.inputs))


class _Node(NamedTuple):
    """A drafted token of a tree: all tokens up to it, and its entry of Batch.paths in the head's cache."""

    history: list[int]
    path: tuple[int, ...]


class DraftHeadSource:
    """A DraftSource that computes drafts with a draft head. Verified states stay on the device of the head's layer. The
    device of the model's lm_head chooses the drafts. If that is a GPU, it returns only a draft's id and confidence."""

    name = "draft head"
    is_free = False

    def __init__(
        self,
        layer: Callable[[], DraftHeadLayer | None],
        target: Executor,
        vocabulary: DraftVocabulary | None = None,
        warn: Callable[[str], None] | None = None,
        draft_s: float = 0.0,
    ) -> None:
        """Create a source.

        Args:
            layer: Returns the current layer, or None if there is none. A new layer starts without states.
            vocabulary: The tokens that can be drafted; None for the model's vocabulary.
            warn: Called once if a number is not finite. Tokens that depend on it are not drafted.
        """
        self._layer_now, self._target, self.end = layer, target, DraftEnd(is_normed=True, vocabulary=vocabulary)
        self._warn, self._has_warned = warn, False
        self._layer: DraftHeadLayer | None = None
        self._sequences: dict[int, _Sequence] = {}
        self.draft_s = draft_s

    @torch.inference_mode()
    def drafts(self, sequence: int, token_ids: Sequence[int], choose: Choose) -> Generator[Draft]:
        """See DraftSource.drafts. Yields nothing unless the state before the newest token was observed."""
        held = self._known(sequence, token_ids)
        if held is None:
            return
        history = list(token_ids)
        try:
            self._catch_up(held, history[held.end])
            state, following = held.tip, history[held.end + 1 :]
            while state is not None:
                for token_id in following:
                    state = None if state is None else self._after(held, token_id, state)
                drafted = None if state is None else self._drafted(held.layer.normed(state), history, choose)
                if drafted is None:
                    return
                history.append(drafted.token_id)
                following = [drafted.token_id]
                yield drafted
                if self._layer_now() is not held.layer:
                    return
        finally:
            held.cut()

    @torch.inference_mode()
    def levels(self, sequence: int, token_ids: Sequence[int], choose: ChooseSeveral) -> Levels:
        """See TreeSource.levels. The nodes of a level pass the head together. A cache that forgets gets no tree."""
        held = self._known(sequence, token_ids)
        if held is None or held.layer.cache.is_bounded:
            return
        cache, nodes = held.layer.cache, [_Node(list(token_ids), ())]
        try:
            self._catch_up(held, token_ids[held.end])
            states = held.tip
            for token_id in token_ids[held.end + 1 :]:
                states = None if states is None else self._after(held, token_id, states)
            while states is not None:
                drafted = choose(held.layer.normed(states), self.end, [node.history for node in nodes])
                if not all(drafted):
                    self._tell_not_finite()
                chosen = yield [[Draft(*each) for each in row] for row in drafted]
                first = cache.length(held.slot)
                if not chosen or self._layer_now() is not held.layer or first + len(chosen) > cache.max_tokens:
                    return
                tokens, at = [drafted[node][number].token_id for node, number in chosen], [node for node, _ in chosen]
                position = len(nodes[0].history) - 1 - held.first
                nodes = [
                    _Node([*nodes[node].history, token_id], path_of(nodes[node].path, slot, position))
                    for slot, (node, token_id) in enumerate(zip(at, tokens, strict=True), first)
                ]
                places, paths = ((held.slot,) * len(at), (position,) * len(at)), tuple(node.path for node in nodes)
                before = held.layer.on_device(partial(states.__getitem__, at))
                states = self._predicted(held, Batch(tuple(tokens), *places, paths=paths), before)
        finally:
            held.cut()

    def observe(
        self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor, *captured: Tensor
    ) -> None:
        """See DraftSource.observe. Replaces tokens that it already holds. Forgets all tokens before a gap."""
        layer = self._current()
        if layer is None:
            return
        held = self._sequences.get(sequence)
        if held is not None and held.first <= first_position <= held.end:
            self.truncate(sequence, first_position)
        else:
            self.close(sequence)
            self._sequences[sequence] = held = _Sequence(layer, layer.cache.open_new(), first_position)
        states, n_held = held.states, len(held.token_ids)
        if token_ids:
            layer.keep(normed, captured, lambda first, here: states.put(n_held + first, here))
        held.token_ids += token_ids

    def read_prompt(
        self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor, *captured: Tensor
    ) -> None:
        """See DraftSource.read_prompt. The last position is computed when the token after it is known."""
        self.observe(sequence, first_position, token_ids, normed, *captured)
        held = self._sequences.get(sequence)
        if held is not None and held.end <= held.layer.cache.max_tokens:
            try:
                self._catch_up(held)
            finally:
                held.cut()

    def truncate(self, sequence: int, length: int) -> None:
        self._current()
        held = self._sequences.get(sequence)
        if held is not None:
            n_kept = max(0, length - held.first)
            del held.token_ids[n_kept:]
            self._forget(held, n_kept)

    def close(self, sequence: int) -> None:
        self._current()
        held = self._sequences.pop(sequence, None)
        if held is not None:
            held.layer.cache.close(held.slot)

    def _current(self) -> DraftHeadLayer | None:
        """Return the current layer. If it is a new one, forget all sequences."""
        layer = self._layer_now()
        if layer is not self._layer:
            self._layer = layer
            self._sequences.clear()
        return layer

    def _known(self, sequence: int, token_ids: Sequence[int]) -> _Sequence | None:
        """Return the sequence's state, or None if the tokens before the newest one were not observed or don't fit."""
        self._current()
        held = self._sequences.get(sequence)
        if held is None or not held.token_ids or len(token_ids) <= held.end:
            return None
        return held if held.end <= held.layer.cache.max_tokens else None

    def _after(self, held: _Sequence, token_id: int, state: Tensor) -> Tensor | None:
        """Return the state after a drafted token, computed from the head's prediction, or None if the cache is full."""
        cache = held.layer.cache
        length = cache.length(held.slot)
        if length == cache.max_tokens:
            return None
        return self._predicted(held, Batch.of_sequence(held.slot, length, [token_id]), state)

    def _drafted(self, state: Tensor, history: list[int], choose: Choose) -> Draft | None:
        """Return the draft chosen from this state (1, hidden), or None if a number is not finite."""
        token_id, confidence = choose(state, self.end, history)
        if token_id != NO_TOKEN and math.isfinite(confidence):
            return Draft(token_id, confidence)
        self._tell_not_finite()
        return None

    def _tell_not_finite(self) -> None:
        if self._warn and not self._has_warned:
            self._warn(NOT_FINITE)
        self._has_warned = True

    @torch.inference_mode()
    def _catch_up(self, held: _Sequence, *newest: int) -> None:
        """Compute the verified positions that the head's cache lacks. The last one needs the newest token.

        The last position may have been computed with another token, because truncate() cuts before its position's
        token.
        """
        following = [*held.token_ids[len(held.inputs) :], *newest]  # the last input, then those to be computed
        if (
            held.inputs
            and following
            and (following[0] != held.inputs[-1] or (held.tip is None and len(following) == 1))
        ):
            self._forget(held, len(held.inputs) - 1)
            following.insert(0, held.token_ids[len(held.inputs)])
        for start in range(1, len(following), BESIDE_ROWS):
            tokens, first = following[start : start + BESIDE_ROWS], len(held.inputs)
            states = held.layer.on_device(partial(held.states.rows, first, first + len(tokens)))
            predicted = self._predicted(held, Batch.of_sequence(held.slot, first, tokens), states)
            if predicted is None:
                held.tip = None
                return
            held.tip = held.layer.on_device(predicted[-1:].clone)
            held.inputs += tokens

    def _forget(self, held: _Sequence, n_kept: int) -> None:
        """Keep the first n_kept positions of the head's cache. The prediction after them is recomputed on demand."""
        if n_kept < len(held.inputs):
            del held.inputs[n_kept:]
            held.tip = None
            held.cut()

    def _predicted(self, held: _Sequence, batch: Batch, states: Tensor) -> Tensor | None:
        """Return the next states (m, hidden), or None if the model changed its plan while it computed embeddings."""
        layer = held.layer
        embedded = layer.embed(list(batch.token_ids))
        if embedded is None:
            embedded = self._target.run(batch, None, range(0))
            if self._layer_now() is not layer:
                return None
        return layer.guess(embedded, states, batch)
