"""Ollama's API for text: /api/chat and /api/generate."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hetero_ee.errors import HeteroError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.serving.answers import answered, until_gone
from hetero_ee.serving.errors import ollama_error
from hetero_ee.serving.protocols import sampling_fields
from hetero_ee.serving.protocols.body import Fields
from hetero_ee.serving.protocols.messages import ollama_messages, text_of
from hetero_ee.serving.protocols.ollama_models import timestamp
from hetero_ee.serving.protocols.sampling_fields import OPTIONS, read_request, refuse_unsupported
from hetero_ee.serving.served_model import ServedModel
from hetero_ee.serving.tools.chat import Form, constrained, effort_variables, prepared, schema_form
from hetero_ee.serving.tools.reply import Call, Reply
from hetero_ee.serving.tools.reply_reader import SAID, THOUGHT
from hetero_ee.serving.tools.tool import ToolUse, openai_tools
from hetero_ee.text.chat_template import Message

LINES_TYPE = "application/x-ndjson"
NS = 10**9
REFUSED: dict[str, tuple[Any, ...]] = {  # as in sampling_fields.py
    "images": ([],),
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
}


async def chat(request: Request, served: ServedModel) -> Response:
    """Answer a chat. Without messages, which loads the model in ollama, there is nothing to do."""
    fields = await read_request(request, served.settings, REFUSED)
    if not fields.items("messages"):
        return JSONResponse(_document(served, _message("")) | {"done_reason": "load", "done": True})
    return await _answered(request, served, fields, ollama_messages(fields), is_chat=True)


async def generate(request: Request, served: ServedModel) -> Response:
    """Answer a prompt, which the chat template makes a user's message of unless it is `raw`."""
    fields = await read_request(request, served.settings, REFUSED)
    if fields.values.get("prompt") in (None, ""):
        return JSONResponse(_document(served, {"response": ""}) | {"done_reason": "load", "done": True})
    prompt, system = text_of(fields, "prompt"), fields.text("system")
    if not fields.flag("raw") and served.template is not None:
        said = [Message("system", text_of(fields, "system"))] if system else []
        return await _answered(request, served, fields, [*said, Message("user", prompt)], is_chat=False)
    params, form = _params(fields, served), _form(fields)
    if form is not None:
        params = await until_gone(request, constrained(served, params, form.changes, form.field))
    reply = Reply(served.generation(await served.prompt_ids(prompt), params), None)
    return await _Answer(served, reply, is_chat=False).response(request, fields)


async def _answered(
    request: Request, served: ServedModel, fields: Fields, said: Sequence[Message], *, is_chat: bool
) -> Response:
    effort = fields.values.get("think")
    if effort is not None and not isinstance(effort, bool):
        effort = fields.text("think")
    use, variables = openai_tools(fields) if is_chat else ToolUse(), effort_variables(served.template, effort)
    work = prepared(served, said, _params(fields, served), use, _form(fields), variables)
    chat = await until_gone(request, work)
    reply = Reply(served.generation(chat.prompt_ids, chat.params), chat)
    return await _Answer(served, reply, is_chat=is_chat).response(request, fields)


def _params(fields: Fields, served: ServedModel) -> SamplingParams:
    options = fields.inner("options")
    refuse_unsupported(options, sampling_fields.REFUSED)
    return OPTIONS.read(options, served.usual, served.engine.spec.vocab_size)


def _form(fields: Fields) -> Form | None:
    """Return the form in `format`, which is "json" or a schema."""
    form = fields.values.get("format")
    if form in (None, ""):
        return None
    kind, schema = ("json_object", {}) if form == "json" else ("json_schema", {"schema": form})
    return schema_form(fields, kind, Fields(schema, "format."), "format")


class _Answer:
    """Answer to a chat or a prompt, as one document or as lines of JSON, which is the default."""

    def __init__(self, served: ServedModel, reply: Reply, *, is_chat: bool) -> None:
        self._served, self._reply, self._is_chat = served, reply, is_chat

    async def response(self, request: Request, fields: Fields) -> Response:
        is_stream = fields.values.get("stream") is None or fields.flag("stream")
        ping_s = self._served.settings.ping_s if is_stream else None
        return await answered(request, self, [self._reply.generation], ping_s, LINES_TYPE)

    async def whole(self) -> dict[str, Any]:
        reply = self._reply
        await reply.finish()
        return self._part(reply.content, reply.thought, reply.calls) | self._end()

    async def events(self, ping_s: float) -> AsyncIterator[bytes]:
        """Yield the pieces of the reply, its calls in one line, and last a line with the figures."""
        try:
            async for piece in self._reply.pieces(ping_s):
                if piece is not None and piece.kind in (SAID, THOUGHT):
                    said, thought = (piece.text if piece.kind == each else "" for each in (SAID, THOUGHT))
                    yield _line(self._part(said, thought))
            if self._reply.calls:
                yield _line(self._part(calls=self._reply.calls))
        except HeteroError as error:
            yield _line(ollama_error(error))
            return
        yield _line(self._part() | self._end())

    def _part(self, said: str = "", thought: str = "", calls: Sequence[Call] = ()) -> dict[str, Any]:
        more = {"thinking": thought} if thought else {}
        part = _message(said, **more, calls=calls) if self._is_chat else {"response": said, **more}
        return _document(self._served, part)

    def _end(self) -> dict[str, Any]:
        generation = self._reply.generation
        cost = generation.cost()
        return {
            "done": True,
            "done_reason": generation.finish_reason,
            "total_duration": round((cost.queue_s + cost.prefill_s + cost.decode_s) * NS),
            "load_duration": 0,
            "prompt_eval_count": cost.n_prompt_tokens,
            "prompt_eval_duration": round(cost.prefill_s * NS),
            "eval_count": cost.n_tokens,
            "eval_duration": round(cost.decode_s * NS),
        }


def _line(document: dict[str, Any]) -> bytes:
    return (json.dumps(document) + "\n").encode()


def _document(served: ServedModel, part: dict[str, Any]) -> dict[str, Any]:
    return {"model": served.settings.model_name, "created_at": timestamp(), **part, "done": False}


def _message(content: str, *, calls: Sequence[Call] = (), **more: str) -> dict[str, Any]:
    called = [{"function": {"name": each.name, "arguments": each.parsed}} for each in calls]
    tools: dict[str, Any] = {"tool_calls": called} if called else {}
    return {"message": {"role": "assistant", "content": content, **more, **tools}}
