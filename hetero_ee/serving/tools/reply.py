"""Collects a reply as its pieces arrive, for any protocol."""

import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from hetero_ee.decoding.result import FinishReason
from hetero_ee.serving.generation import Generation
from hetero_ee.serving.tools.chat import Chat
from hetero_ee.serving.tools.reply_reader import ARGUMENTS, CALLED, SAID, THOUGHT, Piece


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""  # JSON

    @property
    def parsed(self) -> Any:
        """The arguments as an object, which is empty if the call was cut off or is nested too deep."""
        try:
            return json.loads(self.arguments)
        except (ValueError, RecursionError):
            return {}


class RepeatedCalls:
    """Filter for replies that must call tools. Drops the first call that repeats an earlier one, and ends the reply.

    Small models that must call repeat the same call until the token limit. Pieces of a call are held back while they
    could still become a repetition.
    """

    def __init__(self) -> None:
        self.is_found = False
        self._calls, self._held = list[str](), list[Piece]()

    def passed(self, piece: Piece) -> list[Piece]:
        """Add a piece, and return all pieces held so far that are certainly not part of a repeated call."""
        if self.is_found or piece.block != CALLED:
            return [] if self.is_found else [piece]
        if piece.kind == CALLED:
            self._calls.append(piece.text)
        else:
            self._calls[-1] += piece.text
        *earlier, call = self._calls
        self._held.append(piece)
        self.is_found = call in earlier  # equal means complete: no JSON object is a prefix of another
        if any(each.startswith(call) for each in earlier):
            return []
        held, self._held = self._held, []
        return held


class Reply:
    """Reply of one generation. `content`, `thought` and `calls` grow as its pieces arrive.

    Without a chat, all text is content, and the echo of the prompt comes first.
    """

    def __init__(self, generation: Generation, chat: Chat | None) -> None:
        self.generation, self._chat = generation, chat
        self.content, self.thought, self.calls = "", "", list[Call]()

    @property
    def has_called(self) -> bool:
        """Whether the reply has ended with tool calls."""
        return bool(self.calls) and self.generation.reason is FinishReason.STOP

    async def pieces(self, ping_s: float | None = None) -> AsyncIterator[Piece | None]:
        """Yield the pieces, and None after each `ping_s` without a token. Raises: see `Generation.tokens`."""
        reader = None if self._chat is None else self._chat.reader()
        repeats = RepeatedCalls() if self._chat is not None and self._chat.must_call else None
        async for token in self.generation.tokens(ping_s):
            if token is None:
                yield None
            elif reader is None or self._chat is None:
                if text := self.generation.taken_echo() + token.text:
                    yield self._added(Piece(SAID, text))
            else:
                for each in reader.read(token.text + self._chat.special_texts.get(token.token_id, "")):
                    for piece in (each,) if repeats is None else repeats.passed(each):
                        yield self._added(piece)
                if repeats is not None and repeats.is_found:
                    self.generation.end()
        for each in () if reader is None else reader.end():
            yield self._added(each)

    async def finish(self) -> None:
        """Wait for the whole reply. Raises: see `Generation.tokens`."""
        async for _ in self.pieces():
            pass

    def _added(self, piece: Piece) -> Piece:
        if piece.kind == SAID:
            self.content += piece.text
        elif piece.kind == THOUGHT:
            self.thought += piece.text
        elif piece.kind == CALLED:
            is_short = self._chat is not None and self._chat.format is not None and self._chat.format.short_ids
            call_id = secrets.token_hex(5)[:9] if is_short else f"call_{secrets.token_hex(12)}"
            self.calls.append(Call(call_id, piece.text))
        elif piece.kind == ARGUMENTS:
            self.calls[-1].arguments += piece.text
        return piece
