"""Collects a reply as its pieces arrive, for any protocol."""

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass

from hetero_ee.decoding.result import FinishReason
from hetero_ee.serving.generation import Generation
from hetero_ee.serving.tools.chat import Chat
from hetero_ee.serving.tools.reply_reader import ARGUMENTS, CALLED, SAID, THOUGHT, Piece


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""  # JSON


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
        async for token in self.generation.tokens(ping_s):
            if token is None:
                yield None
            elif reader is None or self._chat is None:
                if text := self.generation.taken_echo() + token.text:
                    yield self._added(Piece(SAID, text))
            else:
                for each in reader.read(token.text + self._chat.special_texts.get(token.token_id, "")):
                    yield self._added(each)
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
