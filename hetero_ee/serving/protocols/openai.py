"""OpenAI's Chat Completions and Completions APIs: /v1/chat/completions and /v1/completions."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hetero_ee.decoding.logprobs import NO_LOGPROBS
from hetero_ee.decoding.result import FULL_MODEL, GeneratedToken, TokenOrigin
from hetero_ee.errors import HeteroError, shown
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.serving.answers import PING, answered, event, until_gone
from hetero_ee.serving.errors import openai_error
from hetero_ee.serving.generation import Echo, Generation
from hetero_ee.serving.protocols.body import Fields
from hetero_ee.serving.protocols.logprobs import asked_by_chat, asked_by_completion, ids_in, of_chat, of_completion
from hetero_ee.serving.protocols.messages import openai_messages
from hetero_ee.serving.protocols.sampling_fields import (
    CHATS,
    REFUSED,
    REFUSED_IN_CHATS,
    REFUSED_IN_TEXTS,
    TEXTS,
    read_request,
)
from hetero_ee.serving.scheduler import Scoring
from hetero_ee.serving.served_model import ServedModel
from hetero_ee.serving.tools.chat import Chat, asked_form, constrained, effort_variables, prepared
from hetero_ee.serving.tools.reply import Reply
from hetero_ee.serving.tools.reply_reader import ARGUMENTS, SAID, THOUGHT, Piece
from hetero_ee.serving.tools.tool import openai_tools

DONE = "[DONE]"
ORIGINS = "return_token_origins"  # an extension of this server
# `object` of whole answers and of events, after the beginning of their ids.
CHAT_NAMES, TEXT_NAMES = ("chatcmpl-", "chat.completion", "chat.completion.chunk"), ("cmpl-", *["text_completion"] * 2)


async def chat_completions(request: Request, served: ServedModel) -> Response:
    fields = await read_request(request, served.settings, REFUSED, REFUSED_IN_CHATS)
    n_logprobs = _offered(asked_by_chat(fields), fields, served)
    params = CHATS.read(fields, served.usual, served.engine.spec.vocab_size, n_logprobs)
    asked = _Asked.of(fields)
    _check_n(asked.n_each, 1, fields, served)
    chat = await read_chat(request, fields, served, params)
    generations = _started([(chat.prompt_ids, None)], asked, chat.params, served)
    return await _Answer(served, asked, generations, chat).response(request)


async def read_chat(request: Request, fields: Fields, served: ServedModel, params: SamplingParams) -> Chat:
    """Return the chat that a request with OpenAI's fields asks for. Raises: HeteroError: if it can't be answered."""
    variables = effort_variables(served.template, fields.text("reasoning_effort"))
    variables |= fields.inner("chat_template_kwargs").values
    use, form = openai_tools(fields), asked_form(fields)
    return await until_gone(request, prepared(served, openai_messages(fields), params, use, form, variables))


async def completions(request: Request, served: ServedModel) -> Response:
    fields = await read_request(request, served.settings, REFUSED, REFUSED_IN_TEXTS)
    n_logprobs = _offered(asked_by_completion(fields), fields, served)
    is_echo, asked, prompts = fields.flag("echo"), _Asked.of(fields), _prompts(fields)
    _check_n(asked.n_each, len(prompts), fields, served)
    scoring = None
    if is_echo and n_logprobs is not None:
        is_all = fields.whole("max_tokens") == 0  # which no text may have
        fields = Fields({**fields.values, "max_tokens": 1}) if is_all else fields
        scoring = Scoring(n_logprobs, is_all)
    params = TEXTS.read(fields, served.usual, served.engine.spec.vocab_size, n_logprobs)
    form = asked_form(fields)
    if form is not None:
        params = await until_gone(request, constrained(served, params, form.changes, form.field))
    ids = [await served.prompt_ids(each) for each in prompts]
    echoes = [await served.echo(*each, scoring) if is_echo else None for each in zip(prompts, ids, strict=True)]
    generations = _started(list(zip(ids, echoes, strict=True)), asked, params, served)
    return await _Answer(served, asked, generations).response(request)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The form of the answer that a request asks for."""

    is_stream: bool
    has_usage: bool  # whether usage is sent in an event of its own
    n_each: int  # number of texts per prompt
    has_origins: bool  # whether tokens carry their origins

    @classmethod
    def of(cls, fields: Fields) -> "_Asked":
        n_each = fields.whole("n")
        has_usage = fields.inner("stream_options").flag("include_usage")
        return cls(fields.flag("stream"), has_usage, 1 if n_each is None else n_each, fields.flag(ORIGINS))


class _Answer:
    """Answer to a chat or, if `chat` is None, to a completion."""

    def __init__(
        self, served: ServedModel, asked: _Asked, generations: Sequence[Generation], chat: Chat | None = None
    ) -> None:
        self._served, self._asked, self._is_chat = served, asked, chat is not None
        self._generations, reads = generations, chat is not None and not chat.is_plain
        self._replies = [Reply(each, chat if reads else None) for each in generations]
        prefix, self._whole, self._event_object = CHAT_NAMES if self._is_chat else TEXT_NAMES
        name = served.settings.model_name
        self._head = {"id": prefix + secrets.token_hex(12), "created": int(time.time()), "model": name}

    async def response(self, request: Request) -> Response:
        ping_s = self._served.settings.ping_s if self._asked.is_stream else None
        return await answered(request, self, self._generations, ping_s)

    async def whole(self) -> dict[str, Any]:
        choices = []
        for index, each in enumerate(self._replies):
            await each.finish()
            said = {"message": _message(each)} if self._is_chat else {"text": each.generation.text}
            choices.append(await self._choice(index, each, said, _finish_reason(each)))
        return {**self._head, "object": self._whole, "choices": choices, "usage": self._usage(), **self._timings()}

    async def events(self, ping_s: float) -> AsyncIterator[bytes]:
        """Yield all texts piece by piece, with their finish reasons and, if requested, the usage."""
        try:
            for index, each in enumerate(self._replies):
                if self._is_chat:
                    delta = {"role": "assistant", "content": ""}
                    yield self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
                said: dict[str, Any]
                async for piece in each.pieces(ping_s):
                    if piece is None:
                        yield PING
                        continue
                    said = {"delta": _delta(piece, each)} if self._is_chat else {"text": piece.text}
                    yield self._event([await self._choice(index, each, said, None)])
                said = {"delta": {}} if self._is_chat else {"text": each.generation.taken_echo()}
                yield self._event([await self._choice(index, each, said, _finish_reason(each))], **self._timings())
        except HeteroError as error:
            yield event(openai_error(error))
            return
        if self._asked.has_usage:
            yield self._event([], usage=self._usage())
        yield event(DONE)

    async def _choice(
        self, index: int, reply: Reply, said: dict[str, Any], finish_reason: str | None
    ) -> dict[str, Any]:
        """Return a choice, with log-probabilities and origins of the tokens since the previous one if requested."""
        tokens, reply.generation.placed = reply.generation.placed, []
        logprobs = None
        if tokens:
            texts = await self._served.token_texts(ids_in(tokens))
            logprobs = of_chat(tokens, texts) if self._is_chat else of_completion(tokens, texts)
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._asked.has_origins:
            kept, reply.generation.kept = reply.generation.kept, []
            choice["token_origins"] = [_origin(each, self._served.engine.spec.n_layers) for each in kept]
        return choice

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self._asked.has_usage else {}
        return event({**self._head, "object": self._event_object, "choices": choices, **usage, **more})

    def _timings(self) -> dict[str, Any]:
        """Return the timings if there is one text. Timings of parallel texts would mean little."""
        return {"timings": self._generations[0].timings()} if len(self._generations) == 1 else {}

    def _usage(self) -> dict[str, Any]:
        """Return the total usage of all texts. Every `n_each` texts share a prompt."""
        prompts = self._generations[:: self._asked.n_each]
        n_prompt = sum(each.n_prompt_tokens for each in prompts)
        n_tokens = sum(each.n_tokens for each in self._generations)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_tokens,
            "total_tokens": n_prompt + n_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(each.n_cached_tokens for each in prompts)},
        }


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.has_called else reply.generation.finish_reason


def _origin(token: GeneratedToken, n_layers: int) -> dict[str, Any]:
    """Return a token's origin, its position in its draft-verify step, and that step's number of drafts."""
    origin = token.origin or TokenOrigin(FULL_MODEL, n_layers)
    place = {"step_index": origin.index, "n_drafted": origin.n_drafted}
    return {"token_id": token.token_id, "text": token.text, "origin": origin.name, "depth": origin.depth, **place}


def _message(reply: Reply) -> dict[str, Any]:
    content = None if reply.calls and not reply.content else reply.content
    calls = [
        {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
        for each in reply.calls
    ]
    thought = {"reasoning_content": reply.thought} if reply.thought else {}
    more: dict[str, Any] = {"tool_calls": calls} if calls else {}
    return {"role": "assistant", "content": content, "refusal": None, **thought, **more}


def _delta(piece: Piece, reply: Reply) -> dict[str, Any]:
    if piece.kind == SAID:
        return {"content": piece.text}
    if piece.kind == THOUGHT:
        return {"reasoning_content": piece.text}
    if piece.kind == ARGUMENTS:
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
    function = {"name": piece.text, "arguments": ""}
    call_id = reply.calls[piece.index].id
    return {"tool_calls": [{"index": piece.index, "id": call_id, "type": "function", "function": function}]}


def _started(
    prompts: Sequence[tuple[list[int], Echo | None]], asked: _Asked, params: SamplingParams, served: ServedModel
) -> list[Generation]:
    """Queue the texts of each prompt. The first text gets the request's seed, and the others the next ones."""
    generations: list[Generation] = []
    try:
        for ids, echo in prompts:
            for index in range(asked.n_each):
                seeded = params if index == 0 else params.changed(seed=(params.seed + index) % 2**64)
                generations.append(served.generation(ids, seeded, echo, keeps_tokens=asked.has_origins))
    except HeteroError:
        for each in generations:
            each.close()
        raise
    return generations


def _check_n(n_each: int, n_prompts: int, fields: Fields, served: ServedModel) -> None:
    most = served.settings.n_slots + served.settings.queue_size
    if n_prompts > most:
        fields.refuse("prompt", f"holds {n_prompts} prompts; expected at most {most}, as may run and wait at a time")
    if not 1 <= n_each <= most // n_prompts:
        fields.refuse("n", f"is {shown(n_each)}; expected 1 to {most // n_prompts}, as may run and wait at a time")


def _offered(n_logprobs: int | None, fields: Fields, served: ServedModel) -> int | None:
    """Return `n_logprobs`. Refuse it if the model's mode has no log-probabilities."""
    if n_logprobs is not None and served.engine.exits is not None:
        fields.refuse("logprobs", f"is {shown(fields.values['logprobs'])}; {NO_LOGPROBS}", code="unsupported_parameter")
    return n_logprobs


def _prompts(fields: Fields) -> list[Any]:
    """Return the prompts, each of which is a text or a list of token ids."""
    prompt = fields.values.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return prompt
    if not isinstance(prompt, str | list):
        fields.refuse("prompt", "is missing; expected text, or a list of token ids")
    return [prompt]
