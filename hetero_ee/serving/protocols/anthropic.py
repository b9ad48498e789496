"""Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens."""

import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hetero_ee.decoding.result import FinishReason
from hetero_ee.errors import HeteroError
from hetero_ee.serving.answers import answered, event, until_gone
from hetero_ee.serving.errors import anthropic_error
from hetero_ee.serving.generation import Generation
from hetero_ee.serving.protocols.body import Fields, read_body
from hetero_ee.serving.protocols.messages import anthropic_messages
from hetero_ee.serving.protocols.sampling_fields import MESSAGES, read_request, refuse_unsupported
from hetero_ee.serving.served_model import ServedModel
from hetero_ee.serving.tools.chat import Form, prepared, schema_form
from hetero_ee.serving.tools.reply import Reply
from hetero_ee.serving.tools.reply_reader import ARGUMENTS, CALLED, SAID, THOUGHT, Piece
from hetero_ee.serving.tools.tool import anthropic_tools

REFUSED: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": ()}


async def messages(request: Request, served: ServedModel) -> Response:
    fields = await read_request(request, served.settings, REFUSED)
    if fields.whole("max_tokens") is None:
        fields.refuse("max_tokens", "is missing; set the largest number of tokens of the reply")
    params = MESSAGES.read(fields, served.usual, served.engine.spec.vocab_size)
    ping_s, said = served.settings.ping_s if fields.flag("stream") else None, anthropic_messages(fields)
    work = prepared(served, said, params, anthropic_tools(fields), _form(fields), _variables(fields))
    chat = await until_gone(request, work)
    generation = served.generation(chat.prompt_ids, chat.params)
    return await answered(request, _Answer(served.settings.model_name, Reply(generation, chat)), [generation], ping_s)


async def count_tokens(request: Request, served: ServedModel) -> Response:
    fields = await read_body(request, served.settings)
    refuse_unsupported(fields, REFUSED)
    use, variables = anthropic_tools(fields), _variables(fields)
    work = prepared(served, anthropic_messages(fields), served.usual, use, variables=variables)
    chat = await until_gone(request, work)
    return JSONResponse({"input_tokens": len(chat.prompt_ids)})


def _variables(fields: Fields) -> dict[str, Any]:
    """Return the template variable that turns thinking on or off. Thinking budgets are ignored."""
    thinking = fields.inner("thinking").text("type")
    return {} if thinking is None else {"enable_thinking": thinking != "disabled"}


def _form(fields: Fields) -> Form | None:
    """Return the form in `output_config.format`, or in its former name `output_format`."""
    asked = fields.inner("output_config").inner("format")
    asked = asked if asked.values else fields.inner("output_format")
    return schema_form(asked, asked.values.get("type"), asked, "output_config.format") if asked.values else None


class _Answer:
    """Answer with one message. A streamed message has blocks, at least one with text."""

    def __init__(self, model: str, reply: Reply) -> None:
        self._model, self._reply = model, reply
        self._index, self._kind = -1, ""  # of the current block

    async def whole(self) -> dict[str, Any]:
        reply = self._reply
        await reply.finish()
        found: list[dict[str, Any]] = []
        if reply.thought:
            found.append({"type": "thinking", "thinking": reply.thought, "signature": ""})
        if reply.content or not (reply.thought or reply.calls):
            found.append({"type": "text", "text": reply.content})
        for each in reply.calls:
            found.append({"type": "tool_use", "id": each.id, "name": each.name, "input": each.parsed})
        return self._message(found) | _stop(reply)

    async def events(self, ping_s: float) -> AsyncIterator[bytes]:
        try:
            yield _named("message_start", message=self._message([]))
            async for piece in self._reply.pieces(ping_s):
                for each in (_named("ping"),) if piece is None else self._block_events(piece):
                    yield each
        except HeteroError as error:
            yield event(anthropic_error(error), "error")
            return
        for each in () if self._kind else self._begin(SAID):
            yield each
        yield _named("content_block_stop", index=self._index)
        yield _named("message_delta", delta=_stop(self._reply), usage=_usage(self._reply.generation))
        yield _named("message_stop")

    def _block_events(self, piece: Piece) -> Iterator[bytes]:
        """Yield the events of the next piece. The piece starts a new block unless one of its kind is open."""
        if piece.kind == CALLED or piece.block != self._kind:
            yield from self._begin(piece.block)
        delta = {
            SAID: {"type": "text_delta", "text": piece.text},
            THOUGHT: {"type": "thinking_delta", "thinking": piece.text},
            CALLED: {"type": "input_json_delta", "partial_json": ""},
            ARGUMENTS: {"type": "input_json_delta", "partial_json": piece.text},
        }[piece.kind]
        yield _named("content_block_delta", index=self._index, delta=delta)

    def _begin(self, kind: str) -> Iterator[bytes]:
        if self._kind:
            yield _named("content_block_stop", index=self._index)
        self._index, self._kind = self._index + 1, kind
        block: dict[str, Any] = {"type": "text", "text": ""}
        if kind == THOUGHT:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif kind == CALLED:
            call = self._reply.calls[-1]
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield _named("content_block_start", index=self._index, content_block=block)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": self._model}
        usage = _usage(self._reply.generation)
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None, "usage": usage}


def _named(kind: str, **more: Any) -> bytes:
    return event({"type": kind, **more}, kind)


def _stop(reply: Reply) -> dict[str, Any]:
    by, reason = reply.generation.stopped_by, reply.generation.reason
    if reason is not FinishReason.STOP:
        word = "model_context_window_exceeded" if reason is FinishReason.CONTEXT else "max_tokens"
        return {"stop_reason": word, "stop_sequence": None}
    word = "stop_sequence" if by is not None else "tool_use" if reply.calls else "end_turn"
    return {"stop_reason": word, "stop_sequence": by}


def _usage(generation: Generation) -> dict[str, int]:
    """Return Anthropic's usage. Its input tokens exclude cached ones, which a stream's first event does not know."""
    n_cached = generation.n_cached_tokens
    return {
        "input_tokens": generation.n_prompt_tokens - n_cached,
        "output_tokens": generation.n_tokens,
        "cache_read_input_tokens": n_cached,
        "cache_creation_input_tokens": 0,
    }
