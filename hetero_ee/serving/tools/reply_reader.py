"""Splits a reply into thoughts, content and calls while it arrives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero_ee.decoding.channels import ANALYSIS, CHANNEL, MESSAGE, START, THINK, THINK_END
from hetero_ee.serving.tools.tool_format import RECIPIENT, ToolFormat

THOUGHT, SAID, CALLED, ARGUMENTS = "thought", "said", "called", "arguments"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one kind. For CALLED, it is the tool's name. `index` counts the calls."""

    kind: str
    text: str
    index: int = 0

    @property
    def block(self) -> str:
        """Kind of the block that the piece belongs to. A call's name and arguments form one block."""
        return CALLED if self.kind == ARGUMENTS else self.kind


class ReplyReader:
    """Reader of replies that match ReplyGrammar. Any other text is content. `form` is None without tools."""

    def __init__(
        self,
        form: ToolFormat | None,
        names: Sequence[str],
        *,
        thinks: bool = False,
        is_thinking: bool = False,
        has_channels: bool = False,
    ) -> None:
        """Start a reply.

        Args:
            thinks: it may begin with thoughts.
            is_thinking: the prompt has already begun them.
            has_channels: it may consist of messages that name their channels; those called analysis are thoughts.
        """
        self._form, self._names, self._buffer, self.n_calls = form, names, "", 0
        self._state: Callable[[], list[Piece] | None] = self._say
        if thinks or is_thinking:
            self._state = self._think if is_thinking else self._begin
        if has_channels:
            self._state = self._head
        self._kind = SAID  # of a message
        self._has_said, self._scanner = False, _ObjectScanner()

    def read(self, text: str) -> list[Piece]:
        """Add text and return the pieces whose kind is certain."""
        self._buffer += text
        found: list[Piece] = []
        while (pieces := self._state()) is not None:
            found += pieces
        return found

    def end(self) -> list[Piece]:
        """Return the remaining pieces. A call without a complete name is dropped."""
        rest, self._buffer = self._buffer, ""
        if self._state == self._think:
            return _piece(THOUGHT, rest)
        if self._state == self._message:
            return _piece(self._kind, rest)
        if self._state == self._head and not rest.startswith((CHANNEL, START, RECIPIENT)):
            return _piece(SAID, rest)
        return _piece(SAID, rest) if self._state in (self._begin, self._say, self._say_all) else []

    def _take(self, n_characters: int) -> str:
        text, self._buffer = self._buffer[:n_characters], self._buffer[n_characters:]
        return text

    def _begin(self) -> list[Piece] | None:
        begun = self._buffer.lstrip()
        if begun.startswith(THINK):
            self._buffer, self._state = begun.removeprefix(THINK), self._think
        elif not begun or THINK.startswith(begun):
            return None
        else:
            self._state = self._say
        return []

    def _head(self) -> list[Piece] | None:
        """Read the head of a message, which ends with MESSAGE. A reply without heads is content."""
        head, found, rest = self._buffer.partition(MESSAGE)
        recipient = head.partition(RECIPIENT)[2]
        name = max((each for each in self._names if recipient.startswith(each)), key=len, default=None)
        if found and name is not None:
            self._buffer = rest
            return self._called(name)
        if found:
            is_thought = head.partition(CHANNEL)[2].startswith(ANALYSIS)
            self._buffer, self._kind, self._state = rest, THOUGHT if is_thought else SAID, self._message
            return []
        if not any(each.startswith(head[: len(each)]) for each in (CHANNEL, START, RECIPIENT)):
            self._state = self._say
            return []
        return None

    def _message(self) -> list[Piece] | None:
        at = self._buffer.find(START)
        text = self._take(_certain(self._buffer, START) if at < 0 else at)
        if at >= 0:
            self._state = self._head
            return _piece(self._kind, text.rstrip())
        return _piece(self._kind, text) or None

    def _think(self) -> list[Piece] | None:
        if not self._has_said:
            self._buffer = self._buffer.lstrip("\n")
        at = self._buffer.find(THINK_END)
        text = self._take(_certain(self._buffer, THINK_END) if at < 0 else at)
        if at >= 0:
            text = text.rstrip()
            self._buffer = self._buffer.removeprefix(THINK_END).lstrip("\n")
            self._state, self._has_said = self._say, False
            return _piece(THOUGHT, text)
        self._has_said = self._has_said or bool(text)
        return _piece(THOUGHT, text) or None

    def _say(self) -> list[Piece] | None:
        if not self._has_said:  # line ends between thoughts and what is said
            self._buffer = self._buffer.lstrip("\n")
        if not self._buffer:
            return None
        if self._form is None:
            self._state = self._say_all
            return []
        trigger = self._form.trigger
        at = self._buffer.find(trigger)
        if self._form.at_start and at != 0 and not trigger.startswith(self._buffer):
            self._state = self._say_all
            return []
        text = self._take(_certain(self._buffer, trigger) if at < 0 else at)
        if at >= 0:
            self._state = self._call
            return _piece(SAID, text.rstrip())
        self._has_said = self._has_said or bool(text)
        return _piece(SAID, text) or None

    def _say_all(self) -> list[Piece] | None:
        return _piece(SAID, self._take(len(self._buffer))) or None

    def _call(self) -> list[Piece] | None:
        """Read a call up to the beginning of its arguments."""
        form = self._form
        assert form is not None
        before = (form.opening if self.n_calls == 0 else form.separator or "") + form.head
        heads = {before + form.named(name): name for name in self._names}
        head = next((each for each in heads if self._buffer.startswith(each)), None)
        if head is not None:
            self._take(len(head))
            return self._called(heads[head])
        if self.n_calls == 0 and not any(each.startswith(self._buffer) for each in heads):
            self._state = self._say_all  # a reply that no grammar held
            return []
        return None

    def _called(self, name: str) -> list[Piece]:
        self._state, self._scanner = self._argue, _ObjectScanner()
        self.n_calls += 1
        return [Piece(CALLED, name, self.n_calls - 1)]

    def _argue(self) -> list[Piece] | None:
        text = self._take(self._scanner.length(self._buffer))
        if self._scanner.is_complete:
            self._state = self._finish
        return _piece(ARGUMENTS, text, self.n_calls - 1) if text or self._scanner.is_complete else None

    def _finish(self) -> list[Piece] | None:
        assert self._form is not None
        if not self._buffer.startswith(self._form.tail):
            return None
        self._take(len(self._form.tail))
        self._state = self._call
        return []


class _ObjectScanner:
    """Scanner that finds the end of a JSON object whose text arrives in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self.is_complete = False

    def length(self, text: str) -> int:
        """Return how many characters of this piece belong to the object."""
        for place, each in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or each != '"'
                self._is_escaped = each == "\\" and not self._is_escaped
            elif each == '"':
                self._in_string = True
            else:
                self._depth += (each in "{[") - (each in "}]")
                if self._depth == 0:
                    self.is_complete = True
                    return place + 1
        return len(text)


def _certain(text: str, marker: str) -> int:
    """Return the number of leading characters that can't be part of the marker or of the blanks before it."""
    n_begun = next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
    return len(text[: len(text) - n_begun].rstrip())


def _piece(kind: str, text: str, index: int = 0) -> list[Piece]:
    return [Piece(kind, text, index)] if text else []
