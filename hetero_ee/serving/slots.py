"""Slots of the KV cache that requests use one after the other, and prefix reuse between requests.

A conversation's next request begins with all earlier turns. If it gets the slot that still holds them, prefill skips
them. A token's keys and values depend only on earlier tokens, so reuse never changes the output.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from hetero_ee.decoding.requests import common_length
from hetero_ee.errors import DeviceMemoryError
from hetero_ee.runtime.executors.executor import Executor

CLOSED = -1


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence of the KV cache and its reusable prefix, which is set when a request gives the slot back."""

    number: int
    sequence: int = CLOSED  # sequence number in the KV cache
    token_ids: list[int] = field(default_factory=list)  # the valid prefix that it holds


@dataclass(frozen=True, slots=True)
class SlotState:
    """Snapshot of a slot, with the token counts of the request that runs in it."""

    number: int
    is_running: bool = False
    n_prompt_tokens: int = 0
    n_generated: int = 0


class Slots:
    """Pool of n_slots slots. `close_sequence` frees a sequence of the KV cache."""

    def __init__(self, executor: Executor, n_slots: int, close_sequence: Callable[[int], None]) -> None:
        self._executor, self._close_sequence = executor, close_sequence
        self._idle = [Slot(number) for number in range(n_slots)]  # the most recently used one last

    @property
    def n_idle(self) -> int:
        return len(self._idle)

    @property
    def n_tokens(self) -> int:
        cache = self._executor.cache
        return sum(cache.length(each) for each in cache.sequences)

    def take(self, token_ids: list[int], n_reply: int) -> tuple[Slot, int]:
        """Reserve the idle slot that suits this prompt best.

        Args:
            n_reply: Number of tokens that may be generated. Idle sequences are freed to fit these and the prompt.

        Returns:
            The slot, and the number of the prompt's first tokens that its sequence holds. The last token of the prompt
            never counts, since its logits are needed.
        """
        slot, cache = self._best_for(token_ids), self._executor.cache
        self._make_room(slot, len(token_ids) + n_reply)
        if slot.sequence == CLOSED or slot.sequence not in cache.sequences:
            slot.sequence, slot.token_ids = self._open(), []
        n_held = min(common_length(slot.token_ids, token_ids), len(token_ids) - 1, cache.length(slot.sequence))
        n_held = cache.truncate(slot.sequence, n_held)
        self._idle.remove(slot)
        return slot, n_held

    def give_back(self, slot: Slot, token_ids: list[int]) -> None:
        """Make the slot idle. `token_ids` is the valid prefix of its sequence; if it is empty, the memory is freed."""
        slot.token_ids = token_ids
        if not token_ids:
            self.free(slot)
        self._idle.append(slot)

    def idle(self, number: int) -> Slot | None:
        """Return the slot with this number, or None if a request runs in it."""
        return next((slot for slot in self._idle if slot.number == number), None)

    def replace(self, slot: Slot, token_ids: list[int], fill: Callable[[int], None]) -> None:
        """Replace the tokens of an idle slot, freeing other idle slots if memory requires it.

        Args:
            fill: Writes the KV cache of the tokens to the given empty sequence. If it raises, the slot is left empty.
        """
        self.free(slot)
        self._make_room(slot, len(token_ids))
        slot.sequence = self._open()
        try:
            fill(slot.sequence)
        except BaseException:
            self.free(slot)
            raise
        slot.token_ids = token_ids

    def erase(self, slot: Slot) -> int:
        """Free an idle slot's memory and return the number of tokens that it held."""
        n_tokens = len(slot.token_ids)
        self.free(slot)
        return n_tokens

    def free_idle(self) -> None:
        for slot in self._idle:
            self.free(slot)

    def held_idle(self) -> bool:
        return any(slot.sequence != CLOSED for slot in self._idle)

    def _make_room(self, taken: Slot, n_tokens: int) -> None:
        """Free idle sequences, the oldest first, until n_tokens fit the planned context.

        Otherwise the plan would have to grow for sequences that may never be used again.
        """
        cache = self._executor.cache
        n_held = sum(cache.length(each) for each in cache.sequences if each != taken.sequence)
        for slot in self._idle:
            if n_held + n_tokens <= cache.max_tokens:
                return
            if slot is not taken and slot.sequence in cache.sequences:
                n_held -= cache.length(slot.sequence)
                self.free(slot)

    def _open(self) -> int:
        """Open a sequence. If memory lacks for its recurrent state, idle sequences are freed first."""
        try:
            return self._executor.cache.open_new()
        except DeviceMemoryError:
            if not self.held_idle():
                raise
            self.free_idle()
            return self._executor.cache.open_new()

    def _best_for(self, token_ids: list[int]) -> Slot:
        """Return the slot of which at least half is a prefix of the prompt, else an empty slot, else the oldest."""
        best = max(self._idle, key=lambda slot: common_length(slot.token_ids, token_ids))
        if 2 * common_length(best.token_ids, token_ids) >= max(1, len(best.token_ids)):
            return best
        return next((slot for slot in self._idle if not slot.token_ids), self._idle[0])

    def free(self, slot: Slot) -> None:
        """Free the memory of a slot's sequence."""
        if slot.sequence != CLOSED:
            self._close_sequence(slot.sequence)
        slot.sequence, slot.token_ids = CLOSED, []
