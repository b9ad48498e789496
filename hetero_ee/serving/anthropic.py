"""/v1/messages and its count_tokens, in Anthropic's format."""

import json
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hetero_ee.decoding.result import FinishReason
from hetero_ee.errors import HeteroError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.serving.answers import EventStream, event, until_gone
from hetero_ee.serving.body import Fields, read_body
from hetero_ee.serving.errors import anthropic_error
from hetero_ee.serving.generation import Generation
from hetero_ee.serving.messages import anthropic_messages
from hetero_ee.serving.sampling_fields import MESSAGES, refuse_unsupported
from hetero_ee.serving.served_model import ServedModel
from hetero_ee.serving.tools.chat import Chat, Form, prepared
from hetero_ee.serving.tools.form_fields import schema_form
from hetero_ee.serving.tools.reply_reader import ARGUMENTS, CALLED, SAID, THOUGHT, Piece
from hetero_ee.serving.tools.said import Call, Said, pieces_of, whole
from hetero_ee.serving.tools.tool import anthropic_tools

REFUSED: dict[str, tuple[Any, ...]] = {
    "mcp_servers": ([],),
    "container": (),
}


async def messages(request: Request, served: ServedModel) -> Response:
    """Answer a message, whole or streamed.

    Raises:
        HeteroError: if the request is refused or fails.
        ClientDisconnect: if the client is gone.
    """
    fields = await read_body(request, served.settings)
    refuse_unsupported(fields, REFUSED)
    params = _sampling(fields, served)
    fields.text("model")  # any name is accepted: there is one model
    is_stream, said = fields.flag("stream"), anthropic_messages(fields)
    work = prepared(served, said, params, anthropic_tools(fields), _form(fields), _variables(fields))
    chat = await until_gone(request, work)
    generation = served.generation(chat.prompt_ids, chat.params)
    name = served.settings.model_name
    if is_stream:
        return EventStream(_events(generation, chat, name, served.settings.ping_s), [generation])
    reply = await until_gone(request, whole(generation, chat), [generation])
    return JSONResponse(_message(name, _content(reply), generation) | _stop(generation, reply))


async def count_tokens(request: Request, served: ServedModel) -> Response:
    """Answer with the number of prompt tokens.

    Raises:
        HeteroError: if the request is refused.
        ClientDisconnect: if the client is gone.
    """
    fields = await read_body(request, served.settings)
    refuse_unsupported(fields, REFUSED)
    use, variables = anthropic_tools(fields), _variables(fields)
    work = prepared(served, anthropic_messages(fields), served.usual, use, variables=variables)
    chat = await until_gone(request, work)
    return JSONResponse({"input_tokens": len(chat.prompt_ids)})


def _variables(fields: Fields) -> dict[str, Any]:
    """Return the template variable for thinking. Thinking budgets are ignored."""
    thinking = fields.inner("thinking").text("type")
    return {} if thinking is None else {"enable_thinking": thinking != "disabled"}


def _form(fields: Fields) -> Form | None:
    """Return the form in `output_config.format`, or in its former name `output_format`."""
    asked = fields.inner("output_config").inner("format")
    asked = asked if asked.values else fields.inner("output_format")
    return schema_form(asked, asked.values.get("type"), asked, "output_config.format") if asked.values else None


def _sampling(fields: Fields, served: ServedModel) -> SamplingParams:
    if fields.whole("max_tokens") is None:
        fields.refuse("max_tokens", "is missing; set the largest number of tokens of the reply")
    return MESSAGES.read(fields, served.usual, served.engine.spec.vocab_size)


async def _events(generation: Generation, chat: Chat, model: str, ping_s: float) -> AsyncIterator[bytes]:
    """Yield the events of a streamed message with at least one text block."""
    said, blocks = Said(), _Blocks()
    try:
        yield _named("message_start", message=_message(model, [], generation))
        async for pieces in pieces_of(generation, chat, said, ping_s):
            if pieces is None:
                yield _named("ping")
            for each in pieces or ():
                for one in blocks.events(each, said):
                    yield one
    except HeteroError as error:
        yield event(anthropic_error(error), "error")
        return
    for one in blocks.end():
        yield one
    yield _named("message_delta", delta=_stop(generation, said), usage=_usage(generation))
    yield _named("message_stop")


class _Blocks:
    """Content blocks of a streamed message."""

    def __init__(self) -> None:
        self._index, self._kind = -1, ""

    def events(self, piece: Piece, said: Said) -> Iterator[bytes]:
        """Yield the events of the next piece. It starts a block unless one of its kind is open."""
        kind = CALLED if piece.kind == ARGUMENTS else piece.kind
        if piece.kind == CALLED or kind != self._kind:
            yield from self._begin(kind, said.calls[piece.index] if kind == CALLED else None)
        delta = {
            SAID: {"type": "text_delta", "text": piece.text},
            THOUGHT: {"type": "thinking_delta", "thinking": piece.text},
            CALLED: {"type": "input_json_delta", "partial_json": ""},
            ARGUMENTS: {"type": "input_json_delta", "partial_json": piece.text},
        }[piece.kind]
        yield _named("content_block_delta", index=self._index, delta=delta)

    def end(self) -> Iterator[bytes]:
        """Yield the end of the last block. An empty message gets an empty text block."""
        if not self._kind:
            yield from self._begin(SAID)
        yield _named("content_block_stop", index=self._index)

    def _begin(self, kind: str, call: Call | None = None) -> Iterator[bytes]:
        if self._kind:
            yield _named("content_block_stop", index=self._index)
        self._index, self._kind = self._index + 1, kind
        block: dict[str, Any] = {"type": "text", "text": ""}
        if kind == THOUGHT:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif call is not None:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield _named("content_block_start", index=self._index, content_block=block)


def _content(said: Said) -> list[dict[str, Any]]:
    """Return the content blocks of a whole message."""
    found: list[dict[str, Any]] = []
    if said.thought:
        found.append({"type": "thinking", "thinking": said.thought, "signature": ""})
    if said.content or not (said.thought or said.calls):
        found.append({"type": "text", "text": said.content})
    return found + [
        {"type": "tool_use", "id": each.id, "name": each.name, "input": _input(each.arguments)} for each in said.calls
    ]


def _input(arguments: str) -> Any:
    """Return a call's arguments, or nothing if the call was cut or is nested too deep."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return {}


def _named(kind: str, **more: Any) -> bytes:
    return event({"type": kind, **more}, kind)


def _message(model: str, content: list[dict[str, Any]], generation: Generation) -> dict[str, Any]:
    name = f"msg_{secrets.token_hex(12)}"
    head = {"id": name, "type": "message", "role": "assistant", "model": model, "content": content}
    return {**head, "stop_reason": None, "stop_sequence": None, "usage": _usage(generation)}


def _stop(generation: Generation, said: Said) -> dict[str, Any]:
    if generation.reason is FinishReason.STOP:
        by = generation.stopped_by
        if said.calls and by is None:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": "end_turn" if by is None else "stop_sequence", "stop_sequence": by}
    is_full = generation.reason is FinishReason.CONTEXT
    return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}


def _usage(generation: Generation) -> dict[str, int]:
    """Return Anthropic's usage. Its input tokens exclude cached ones, which a stream's first event doesn't know yet."""
    n_cached = generation.n_cached_tokens
    return {
        "input_tokens": generation.n_prompt_tokens - n_cached,
        "output_tokens": generation.n_tokens,
        "cache_read_input_tokens": n_cached,
        "cache_creation_input_tokens": 0,
    }
