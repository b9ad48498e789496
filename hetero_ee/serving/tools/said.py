"""A reply as its pieces arrive, for any protocol."""

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from hetero_ee.serving.generation import Generation
from hetero_ee.serving.tools.chat import Chat
from hetero_ee.serving.tools.reply_reader import ARGUMENTS, CALLED, SAID, THOUGHT, Piece


@dataclass(slots=True)
class Call:
    """One call of a tool."""

    id: str
    name: str
    arguments: str = ""  # JSON


@dataclass(slots=True)
class Said:
    """The reply so far."""

    content: str = ""
    thought: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, piece: Piece, chat: Chat) -> None:
        """Add the next piece."""
        if piece.kind == SAID:
            self.content += piece.text
        elif piece.kind == THOUGHT:
            self.thought += piece.text
        elif piece.kind == CALLED:
            is_short = chat.format is not None and chat.format.short_ids
            self.calls.append(
                Call(secrets.token_hex(5)[:9] if is_short else f"call_{secrets.token_hex(12)}", piece.text)
            )
        elif piece.kind == ARGUMENTS:
            self.calls[-1].arguments += piece.text


async def pieces_of(
    generation: Generation, chat: Chat, said: Said, ping_s: float | None = None
) -> AsyncIterator[list[Piece] | None]:
    """Yield the pieces of each token, possibly none, after adding them to `said`; None after each `ping_s` without a
    token. Raises like `Generation.tokens`."""
    reader = chat.reader()
    async for token in generation.tokens(ping_s):
        if token is None:
            yield None
            continue
        found = reader.read(token.text + chat.special_texts.get(token.token_id, ""))
        for each in found:
            said.add(each, chat)
        yield found
    rest = reader.end()
    for each in rest:
        said.add(each, chat)
    yield rest


async def whole(generation: Generation, chat: Chat) -> Said:
    """Return the whole reply. Raises like `Generation.tokens`."""
    said = Said()
    async for _ in pieces_of(generation, chat, said):
        pass
    return said
