"""Sequences of the KV cache that requests use one after the other, and what each still holds of the one before.

A conversation's next request begins with all that was said, so that the sequence which holds that need not read it
again. Keys and values of a token depend on the tokens before it alone, so the text is the same either way.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from hetero_ee.decoding.requests import common_length
from hetero_ee.runtime.executors.executor import Executor

CLOSED = -1


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence. Whoever holds the slot says at its end what the sequence then holds for certain."""

    sequence: int = CLOSED  # its number in the KV cache
    token_ids: list[int] = field(default_factory=list)  # that it holds for certain


class Slots:
    """At most n_slots at a time. close_sequence: frees a sequence of the KV cache."""

    def __init__(self, executor: Executor, n_slots: int, close_sequence: Callable[[int], None]) -> None:
        self._executor, self._close_sequence = executor, close_sequence
        self._idle = [Slot() for _ in range(n_slots)]  # the one used last at the end

    @property
    def n_idle(self) -> int:
        return len(self._idle)

    @property
    def n_tokens(self) -> int:
        """That all sequences hold together, in use or not."""
        cache = self._executor.cache
        return sum(cache.length(each) for each in cache.sequences)

    def take(self, token_ids: list[int], n_reply: int) -> tuple[Slot, int]:
        """An idle slot for this prompt, and how many of its first tokens the slot's sequence holds; the last is never
        one of them, for its logits are wanted. n_reply: tokens that may follow, for which there is to be room."""
        slot, cache = self._best_for(token_ids), self._executor.cache
        self._make_room(slot, len(token_ids) + n_reply)
        if slot.sequence == CLOSED or slot.sequence not in cache.sequences:
            slot.sequence, slot.token_ids = cache.open_new(), []
        n_held = min(common_length(slot.token_ids, token_ids), len(token_ids) - 1, cache.length(slot.sequence))
        n_held = cache.truncate(slot.sequence, n_held)
        self._idle.remove(slot)
        return slot, n_held

    def give_back(self, slot: Slot, token_ids: list[int]) -> None:
        """token_ids: what its sequence holds for certain; it may hold more. None at all frees its memory."""
        slot.token_ids = token_ids
        if not token_ids:
            self._free(slot)
        self._idle.append(slot)

    def free_idle(self) -> None:
        """Gives the memory of all sequences back that nobody uses."""
        for slot in self._idle:
            self._free(slot)

    def held_idle(self) -> bool:
        """Whether a sequence that nobody uses holds memory."""
        return any(slot.sequence != CLOSED for slot in self._idle)

    def _make_room(self, taken: Slot, n_tokens: int) -> None:
        """Idle sequences go, the oldest first, where all would hold more than the one context that was planned for:
        else the plan would have to grow for what nobody may ask for again."""
        cache = self._executor.cache
        n_held = sum(cache.length(each) for each in cache.sequences if each != taken.sequence)
        for slot in self._idle:
            if n_held + n_tokens <= cache.max_tokens:
                return
            if slot is not taken and slot.sequence in cache.sequences:
                n_held -= cache.length(slot.sequence)
                self._free(slot)

    def _best_for(self, token_ids: list[int]) -> Slot:
        """The one that holds most of the prompt, if that is half of what it holds; else an empty one, or the oldest."""
        best = max(self._idle, key=lambda slot: common_length(slot.token_ids, token_ids))
        if 2 * common_length(best.token_ids, token_ids) >= max(1, len(best.token_ids)):
            return best
        return next((slot for slot in self._idle if not slot.token_ids), self._idle[0])

    def _free(self, slot: Slot) -> None:
        if slot.sequence != CLOSED:
            self._close_sequence(slot.sequence)
        slot.sequence, slot.token_ids = CLOSED, []
