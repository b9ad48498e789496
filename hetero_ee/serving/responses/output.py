"""Items of a response while they arrive, and their events."""

import secrets
from collections.abc import Iterator
from typing import Any

from hetero_ee.serving.tools.reply_reader import ARGUMENTS, CALLED, SAID, THOUGHT, Piece
from hetero_ee.serving.tools.said import Call, Said

Event = dict[str, Any]
COMPLETED, INCOMPLETE = "completed", "incomplete"


class Output:
    """Turns pieces into items and events. The last of `items` is in progress until `end`."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._kind = ""

    def add(self, piece: Piece, said: Said) -> Iterator[Event]:
        """Add the next piece, which is already in `said`, and yield its events. It starts an item unless one of its
        kind is open."""
        kind = CALLED if piece.kind == ARGUMENTS else piece.kind
        if piece.kind == CALLED or kind != self._kind:
            yield from self._close(COMPLETED)
            self._kind = kind
            yield from self._open(_call(said.calls[piece.index]) if kind == CALLED else {})
        if piece.kind == CALLED:
            return
        item, place = self.items[-1], self._place
        if kind == CALLED:
            item["arguments"] += piece.text
            yield {"type": "response.function_call_arguments.delta", **place, "delta": piece.text}
            return
        item["content"][0]["text"] += piece.text
        more: Event = {"logprobs": []} if kind == SAID else {}
        yield {"type": f"response.{self._text}.delta", **place, "content_index": 0, "delta": piece.text, **more}

    def end(self, *, is_whole: bool) -> Iterator[Event]:
        """Yield the events that end the last item. An empty response gets an empty message."""
        if not self.items:
            self._kind = SAID
            yield from self._open({})
        yield from self._close(COMPLETED if is_whole else INCOMPLETE)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    @property
    def _text(self) -> str:
        return "reasoning_text" if self._kind == THOUGHT else "output_text"

    def _open(self, call: dict[str, Any]) -> Iterator[Event]:
        item: dict[str, Any] = {"id": f"fc_{secrets.token_hex(12)}", "status": "in_progress", **call}
        if self._kind == SAID:
            item |= {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "content": []}
        elif self._kind == THOUGHT:
            item |= {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "summary": [], "content": []}
        self.items.append(item)
        added = {**item, "content": []} if "content" in item else dict(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": added}
        if "content" in item:
            more: Event = {"annotations": [], "logprobs": []} if self._kind == SAID else {}
            part = {"type": self._text, "text": "", **more}
            item["content"].append(part)
            yield {"type": "response.content_part.added", **self._place, "content_index": 0, "part": dict(part)}

    def _close(self, status: str) -> Iterator[Event]:
        if not self._kind:
            return
        item, place = self.items[-1], self._place
        item["status"] = status
        if self._kind == CALLED:
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **place, **done}
        else:
            (part,) = item["content"]
            more: Event = {"logprobs": []} if self._kind == SAID else {}
            yield {"type": f"response.{self._text}.done", **place, "content_index": 0, "text": part["text"], **more}
            yield {"type": "response.content_part.done", **place, "content_index": 0, "part": part}
        yield {"type": "response.output_item.done", "output_index": place["output_index"], "item": item}
        self._kind = ""


def _call(call: Call) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
