"""Ollama's API for text: /api/chat and /api/generate."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hetero_ee.errors import HeteroError, shown
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.serving.answers import answered, until_gone
from hetero_ee.serving.errors import ollama_error
from hetero_ee.serving.models import Models
from hetero_ee.serving.protocols import sampling_fields
from hetero_ee.serving.protocols.body import Fields, read_body
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
NO_TOOLS = ToolUse()
LOADED, UNLOADED = ({"done_reason": reason, "done": True} for reason in ("load", "unload"))
NO_TIME = ("0", "0.0", "0s", "0m", "0h")
REFUSED: dict[str, tuple[Any, ...]] = {  # with values that are allowed, see sampling_fields.py
    "images": ([],),
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
}


async def is_unload(request: Request, models: Models) -> bool:
    """Return whether a request only unloads its model: no prompt or messages, and keep_alive 0 (`ollama stop`)."""
    given = (await read_body(request, models.settings)).values
    return not (given.get("prompt") or given.get("messages")) and str(given.get("keep_alive")) in NO_TIME


async def unload(request: Request, models: Models) -> Response:
    """Close the model once its requests have ended. The only model of a server stays loaded."""
    name = models.named((await read_body(request, models.settings)).text("model"))
    if not models.is_single:
        await models.unload(name)
    part = _message("") if request.url.path == "/api/chat" else {"response": ""}
    return JSONResponse(_document(name, part) | UNLOADED)


async def chat(request: Request, served: ServedModel) -> Response:
    """Answer a chat. A request without messages only loads the model, which has happened before this call."""
    fields = await read_request(request, served.settings, REFUSED)
    asked, is_empty = _Asked.of(fields, served, openai_tools(fields)), not fields.items("messages")
    if is_empty:
        return JSONResponse(_document(served.settings.model_name, _message("")) | LOADED)
    return await _answered(request, served, ollama_messages(fields), asked, is_chat=True)


async def generate(request: Request, served: ServedModel) -> Response:
    """Answer a prompt. Unless `raw` is set, the chat template renders it as a user message."""
    fields = await read_request(request, served.settings, REFUSED)
    asked, is_raw, has_system = _Asked.of(fields, served), fields.flag("raw"), bool(fields.text("system"))
    if fields.values.get("prompt") in (None, ""):
        return JSONResponse(_document(served.settings.model_name, {"response": ""}) | LOADED)
    prompt = text_of(fields, "prompt")
    if not is_raw and served.template is not None:
        said = [Message("system", text_of(fields, "system"))] if has_system else []
        return await _answered(request, served, [*said, Message("user", prompt)], asked, is_chat=False)
    params, form = asked.params, asked.form
    if form is not None:
        params = await until_gone(request, constrained(served, params, form.changes, form.field))
    reply = Reply(served.generation(await served.prompt_ids(prompt), params), None)
    return await _Answer(served, reply, is_chat=False).response(request, is_stream=asked.is_stream)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Parsed fields of a request, without its messages or prompt."""

    params: SamplingParams
    form: Form | None
    tools: ToolUse
    variables: dict[str, Any]  # variables for the chat template
    is_stream: bool

    @classmethod
    def of(cls, fields: Fields, served: ServedModel, tools: ToolUse = NO_TOOLS) -> Self:
        options, effort = fields.inner("options"), fields.values.get("think")
        refuse_unsupported(options, sampling_fields.REFUSED)
        params = OPTIONS.read(options, served.usual, served.engine.spec.vocab_size)
        if not isinstance(effort, bool):
            effort = fields.text("think")
        is_stream = fields.values.get("stream") is None or fields.flag("stream")
        return cls(params, _form(fields), tools, effort_variables(served.template, effort), is_stream)


def _form(fields: Fields) -> Form | None:
    """Return the output format in the field `format`, which is "json" or a JSON Schema. None: any text."""
    form = fields.values.get("format")
    if form in (None, ""):
        return None
    if form in ("json", {}):
        return schema_form(fields, "json_object", Fields({}), "format")
    if not isinstance(form, dict):
        fields.refuse("format", f'is {shown(form)}; expected "json" or a JSON Schema, an object')
    return schema_form(fields, "json_schema", Fields({"schema": form}, "format."), "format")


async def _answered(
    request: Request, served: ServedModel, said: Sequence[Message], asked: _Asked, *, is_chat: bool
) -> Response:
    work = prepared(served, said, asked.params, asked.tools, asked.form, asked.variables)
    chat = await until_gone(request, work)
    reply = Reply(served.generation(chat.prompt_ids, chat.params), chat)
    return await _Answer(served, reply, is_chat=is_chat).response(request, is_stream=asked.is_stream)


class _Answer:
    """Answer to a chat or a prompt, as lines of JSON (the default) or as one document."""

    def __init__(self, served: ServedModel, reply: Reply, *, is_chat: bool) -> None:
        self._served, self._reply, self._is_chat = served, reply, is_chat

    async def response(self, request: Request, *, is_stream: bool) -> Response:
        ping_s = self._served.settings.ping_s if is_stream else None
        return await answered(request, self, [self._reply.generation], ping_s, LINES_TYPE)

    async def whole(self) -> dict[str, Any]:
        reply = self._reply
        await reply.finish()
        return self._part(reply.content, reply.thought, reply.calls) | self._end()

    async def events(self, ping_s: float) -> AsyncIterator[bytes]:
        """Yield a line for each piece of the reply, one line with all tool calls, and last one with the statistics."""
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
        return _document(self._served.settings.model_name, part)

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


def _document(name: str, part: dict[str, Any]) -> dict[str, Any]:
    return {"model": name, "created_at": timestamp(), **part, "done": False}


def _message(content: str, *, calls: Sequence[Call] = (), **more: str) -> dict[str, Any]:
    called = [{"function": {"name": each.name, "arguments": each.parsed}} for each in calls]
    tools: dict[str, Any] = {"tool_calls": called} if called else {}
    return {"message": {"role": "assistant", "content": content, **more, **tools}}
