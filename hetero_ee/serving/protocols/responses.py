"""OpenAI's Responses API: /v1/responses. The server stores nothing, so each request contains the whole conversation."""

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hetero_ee.decoding.result import FinishReason
from hetero_ee.errors import HeteroError, shown
from hetero_ee.serving.answers import PING, answered, event, until_gone
from hetero_ee.serving.errors import openai_error
from hetero_ee.serving.protocols.body import Fields
from hetero_ee.serving.protocols.messages import text_of, tool_call, with_tool_names
from hetero_ee.serving.protocols.sampling_fields import RESPONSES, read_request
from hetero_ee.serving.served_model import ServedModel
from hetero_ee.serving.tools.chat import Chat, effort_variables, prepared, schema_form
from hetero_ee.serving.tools.reply import Reply
from hetero_ee.serving.tools.reply_reader import CALLED, SAID, THOUGHT, Piece
from hetero_ee.serving.tools.tool import openai_tools
from hetero_ee.text.chat_template import Message

Event = dict[str, Any]
COMPLETED, INCOMPLETE = "completed", "incomplete"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXTS = ("input_text", "output_text", "text")
REFUSED: dict[str, tuple[Any, ...]] = {  # as in sampling_fields.py
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "top_logprobs": (0,),
}


async def responses(request: Request, served: ServedModel) -> Response:
    fields = await read_request(request, served.settings, REFUSED)
    params = RESPONSES.read(fields, served.usual, served.engine.spec.vocab_size)
    ping_s, messages = served.settings.ping_s if fields.flag("stream") else None, _messages(fields)
    asked = fields.inner("text").inner("format")
    form = schema_form(asked, asked.values.get("type"), asked, "text.format") if asked.values else None
    variables = effort_variables(served.template, fields.inner("reasoning").text("effort"))
    work = prepared(served, messages, params, openai_tools(fields, is_flat=True), form, variables)
    chat = await until_gone(request, work)
    generation = served.generation(chat.prompt_ids, chat.params)
    answer = _Answer(fields, served.settings.model_name, chat, Reply(generation, chat))
    return await answered(request, answer, [generation], ping_s)


def _messages(fields: Fields) -> list[Message]:
    """Return the messages in `instructions` and `input`. Leading system messages are joined."""
    instructions = fields.text("instructions")
    found = [Message("system", instructions)] if instructions else []
    if isinstance(fields.values.get("input"), str):
        found.append(Message("user", text_of(fields, "input")))
    else:
        for each in fields.objects("input"):
            _add(each, found)
    if not any(each.role != "system" for each in found):
        fields.refuse(
            "input", "is missing; expected text, or a list of items, at least one of them not a system message"
        )
    n_system = next(n for n, each in enumerate(found) if each.role != "system")
    told = "\n\n".join(each.content for each in found[:n_system] if each.content)
    return with_tool_names([*([Message("system", told)] if told else []), *found[n_system:]])


def _add(fields: Fields, found: list[Message]) -> None:
    kind = fields.text("type") or "message"
    if kind == "message":
        role = fields.text("role")
        if role not in ROLES:
            fields.refuse("role", f"is {shown(role)}; expected {', '.join(ROLES)}")
        found.append(Message(ROLES[role], text_of(fields, "content", TEXTS)))
    elif kind == "function_call":
        call = tool_call(fields, fields.text("call_id"), fields.values.get("arguments") or "")
        if found and found[-1].role == "assistant":  # text before it, or a parallel call
            found[-1] = replace(found[-1], tool_calls=(*found[-1].tool_calls, call))
        else:
            found.append(Message("assistant", "", (call,)))
    elif kind == "function_call_output":
        found.append(Message("tool", text_of(fields, "output", TEXTS), tool_call_id=fields.text("call_id")))
    elif kind != "reasoning":  # thoughts of earlier turns, which models are not shown again
        fields.refuse("type", f"is {shown(kind)}; expected message, function_call or function_call_output")


class _Answer:
    """Answer with one response object."""

    def __init__(self, fields: Fields, model: str, chat: Chat, reply: Reply) -> None:
        self._reply, self._n_events, values = reply, 0, fields.values
        self._items, self._kind = list[dict[str, Any]](), ""  # the last item is in progress and of this kind
        self._head = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": values.get("instructions"),
            "max_output_tokens": values.get("max_output_tokens"),
            "metadata": values.get("metadata") or {},
            "parallel_tool_calls": values.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (values.get("reasoning") or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": chat.params.temperature,
            "text": values.get("text") or {"format": {"type": "text"}},
            "tool_choice": values.get("tool_choice") or "auto",
            "tools": values.get("tools") or [],
            "top_p": chat.params.top_p,
            "truncation": "disabled",
        }

    async def whole(self) -> dict[str, Any]:
        last: Event = {}
        async for each in self._told():
            last = each or last
        response: dict[str, Any] = last["response"]
        return response

    async def events(self, ping_s: float) -> AsyncIterator[bytes]:
        """Yield the response as events with sequence numbers."""
        try:
            async for each in self._told(ping_s):
                yield PING if each is None else self._event(each)
        except HeteroError as error:
            told = openai_error(error)["error"]
            failed = self._document("failed") | {"error": {"code": "server_error", "message": told["message"]}}
            yield self._event({"type": "response.failed", "response": failed})

    async def _told(self, ping_s: float | None = None) -> AsyncIterator[Event | None]:
        """Yield the events, the last of which has the whole response, and None after each `ping_s` without a token."""
        yield {"type": "response.created", "response": self._document("in_progress")}
        yield {"type": "response.in_progress", "response": self._document("in_progress")}
        async for piece in self._reply.pieces(ping_s):
            for each in (None,) if piece is None else self._add(piece):
                yield each
        status = COMPLETED if self._reply.generation.reason is FinishReason.STOP else INCOMPLETE
        for each in self._end(status):
            yield each
        yield {"type": f"response.{status}", "response": self._document(status)}

    def _event(self, told: dict[str, Any]) -> bytes:
        number, self._n_events = self._n_events, self._n_events + 1
        return event({**told, "sequence_number": number}, told["type"])

    def _document(self, status: str) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        has_ended = status in (COMPLETED, INCOMPLETE)
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "output": self._items if has_ended else [],
            "usage": self._usage() if has_ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        generation = self._reply.generation
        return {
            "input_tokens": generation.n_prompt_tokens,
            "input_tokens_details": {"cached_tokens": generation.n_cached_tokens},
            "output_tokens": generation.n_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": generation.n_prompt_tokens + generation.n_tokens,
        }

    def _add(self, piece: Piece) -> Iterator[Event]:
        """Add the next piece of the reply and yield its events. It starts an item unless one of its kind is open."""
        kind = piece.block
        if piece.kind == CALLED or kind != self._kind:
            yield from self._close(COMPLETED)
            self._kind = kind
            call = {}
            if kind == CALLED:
                call_id = self._reply.calls[piece.index].id
                call = {"type": "function_call", "call_id": call_id, "name": piece.text, "arguments": ""}
            yield from self._open(call)
        if piece.kind == CALLED:
            return
        item, place = self._items[-1], self._place
        if kind == CALLED:
            item["arguments"] += piece.text
            yield {"type": "response.function_call_arguments.delta", **place, "delta": piece.text}
            return
        item["content"][0]["text"] += piece.text
        more: Event = {"logprobs": []} if kind == SAID else {}
        yield {"type": f"response.{self._text}.delta", **place, "content_index": 0, "delta": piece.text, **more}

    def _end(self, status: str) -> Iterator[Event]:
        """Yield the events that end the last item. An empty response gets an empty message item."""
        if not self._items:
            self._kind = SAID
            yield from self._open({})
        yield from self._close(status)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    @property
    def _text(self) -> str:
        return "reasoning_text" if self._kind == THOUGHT else "output_text"

    def _open(self, call: dict[str, Any]) -> Iterator[Event]:
        item: dict[str, Any] = {"id": f"fc_{secrets.token_hex(12)}", "status": "in_progress", **call}
        if self._kind == SAID:
            item |= {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "content": []}
        elif self._kind == THOUGHT:
            item |= {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "summary": [], "content": []}
        self._items.append(item)
        added = {**item, "content": []} if "content" in item else dict(item)
        yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": added}
        if "content" in item:
            more: Event = {"annotations": [], "logprobs": []} if self._kind == SAID else {}
            part = {"type": self._text, "text": "", **more}
            item["content"].append(part)
            yield {"type": "response.content_part.added", **self._place, "content_index": 0, "part": dict(part)}

    def _close(self, status: str) -> Iterator[Event]:
        if not self._kind:
            return
        item, place = self._items[-1], self._place
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
