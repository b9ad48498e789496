"""/v1/chat/completions and /v1/completions, in OpenAI's format."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hetero_ee.decoding.logprobs import NO_LOGPROBS
from hetero_ee.decoding.result import FinishReason
from hetero_ee.errors import HeteroError, shown
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.serving.answers import PING, EventStream, event, until_gone
from hetero_ee.serving.body import Fields, read_body
from hetero_ee.serving.errors import openai_error
from hetero_ee.serving.generation import Echo, Generation
from hetero_ee.serving.logprobs import asked_by_chat, asked_by_completion, ids_in, of_chat, of_completion
from hetero_ee.serving.messages import openai_messages
from hetero_ee.serving.sampling_fields import (
    CHATS,
    REFUSED,
    REFUSED_IN_CHATS,
    REFUSED_IN_TEXTS,
    TEXTS,
    refuse_unsupported,
)
from hetero_ee.serving.scheduler import Scoring
from hetero_ee.serving.served_model import ServedModel
from hetero_ee.serving.token_origins import ASKED, of_tokens
from hetero_ee.serving.tools.chat import Chat, constrained, prepared
from hetero_ee.serving.tools.form_fields import asked_form
from hetero_ee.serving.tools.reply_reader import ARGUMENTS, SAID, THOUGHT, Piece
from hetero_ee.serving.tools.said import Said, pieces_of, whole
from hetero_ee.serving.tools.tool import openai_tools

DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class _Kind:
    """Names in the answers of chats or completions."""

    id_prefix: str
    whole: str  # `object` of an answer
    piece: str  # `object` of an event
    is_chat: bool

    def choice(self, index: int, said: Said, logprobs: dict[str, Any] | None, finish_reason: str) -> dict[str, Any]:
        """Return a choice of a whole answer."""
        found = {"message": _message(said)} if self.is_chat else {"text": said.content}
        return {"index": index, **found, "logprobs": logprobs, "finish_reason": finish_reason}

    def delta(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        *,
        is_first: bool = False,
    ) -> dict[str, Any]:
        """Return a choice of an event."""
        role = {"role": "assistant"} if is_first else {}
        content = {"content": text} if text or is_first else {}
        said: dict[str, Any] = {"delta": role | content} if self.is_chat else {"text": text}
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}

    def special(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """Return a choice of a chat's event with an arbitrary delta."""
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


CHAT = _Kind("chatcmpl-", "chat.completion", "chat.completion.chunk", is_chat=True)
TEXT = _Kind("cmpl-", "text_completion", "text_completion", is_chat=False)


async def chat_completions(request: Request, served: ServedModel) -> Response:
    """Answer a chat, whole or streamed.

    Raises:
        HeteroError: if the request is refused or fails.
        ClientDisconnect: if the client is gone.
    """
    fields = await read_body(request, served.settings)
    refuse_unsupported(fields, REFUSED, REFUSED_IN_CHATS)
    n_logprobs = _offered(asked_by_chat(fields), fields, served)
    params = CHATS.read(fields, served.usual, served.engine.spec.vocab_size, n_logprobs)
    messages, asked = openai_messages(fields), _Asked.of(fields)
    use, form = openai_tools(fields), asked_form(fields)
    _check_n(asked.n_each, 1, fields, served)
    variables = fields.inner("chat_template_kwargs").values
    chat = await until_gone(request, prepared(served, messages, params, use, form, variables))
    generations = _started([(chat.prompt_ids, None)], asked, chat.params, served)
    return await _answer(request, _Answer(CHAT, served, asked, chat), generations, served)


async def completions(request: Request, served: ServedModel) -> Response:
    """Answer a completion, whole or streamed.

    Raises:
        HeteroError: if the request is refused or fails.
        ClientDisconnect: if the client is gone.
    """
    fields = await read_body(request, served.settings)
    refuse_unsupported(fields, REFUSED, REFUSED_IN_TEXTS)
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
    return await _answer(request, _Answer(TEXT, served, asked), generations, served)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The requested form of the answer."""

    is_stream: bool
    has_usage: bool  # in an event of its own
    n_each: int  # texts of each prompt
    has_origins: bool  # of tokens

    @classmethod
    def of(cls, fields: Fields) -> "_Asked":
        fields.text("model")  # any name is accepted: there is one model
        n_each = fields.whole("n")
        has_usage = fields.inner("stream_options").flag("include_usage")
        return cls(fields.flag("stream"), has_usage, 1 if n_each is None else n_each, fields.flag(ASKED))


class _Answer:
    """The documents of one answer."""

    def __init__(self, kind: _Kind, served: ServedModel, asked: _Asked, chat: Chat | None = None) -> None:
        self._kind, self._served, self._asked, self._chat = kind, served, asked, chat
        self._said = Said()  # of the current text
        name, created_s = served.settings.model_name, int(time.time())
        self._head = {"id": kind.id_prefix + secrets.token_hex(12), "created": created_s, "model": name}

    @property
    def is_stream(self) -> bool:
        return self._asked.is_stream

    async def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the answer as one document."""
        choices = []
        for index, each in enumerate(generations):
            if self._chat is None or self._chat.is_plain:
                await each.finish()
                self._said = Said(each.text)
            else:
                self._said = await whole(each, self._chat)
            choice = self._kind.choice(index, self._said, await self._logprobs(each), self._finish_reason(each))
            choices.append(choice | self._origins(each))
        tail = {"usage": _usage(generations, self._asked.n_each), **_timings(generations)}
        return {**self._head, "object": self._kind.whole, "choices": choices, **tail}

    async def events(self, generations: Sequence[Generation], ping_s: float) -> AsyncIterator[bytes]:
        """Yield the texts piece by piece, one after another, with their finish reasons and, if requested, the usage."""
        try:
            for index, each in enumerate(generations):
                async for piece in self._pieces(index, each, ping_s):
                    yield piece
                logprobs = await self._logprobs(each)
                end = self._kind.delta(index, each.taken_echo(), logprobs, self._finish_reason(each))
                yield self._piece([end | self._origins(each)], **_timings(generations))
        except HeteroError as error:
            yield event(openai_error(error))
            return
        if self._asked.has_usage:
            yield self._piece([], usage=_usage(generations, self._asked.n_each))
        yield event(DONE)

    async def _pieces(self, index: int, generation: Generation, ping_s: float) -> AsyncIterator[bytes]:
        """Yield a text without its end. The echo comes with the first token to keep log-probabilities in order."""
        if self._kind.is_chat:
            yield self._piece([self._kind.delta(index, "", None, None, is_first=True)])
        if self._chat is not None and not self._chat.is_plain:
            async for event in self._parts(index, generation, self._chat, ping_s):
                yield event
            return
        async for token in generation.tokens(ping_s):
            if token is None:
                yield PING
            elif text := generation.taken_echo() + token.text:
                said = self._kind.delta(index, text, await self._logprobs(generation), None)
                yield self._piece([said | self._origins(generation)])

    async def _parts(self, index: int, generation: Generation, chat: Chat, ping_s: float) -> AsyncIterator[bytes]:
        """Yield a reply with thoughts or calls without its end."""
        self._said = Said()
        async for pieces in pieces_of(generation, chat, self._said, ping_s):
            if pieces is None:
                yield PING
            for each in pieces or ():
                said = self._kind.special(index, _delta(each, self._said), await self._logprobs(generation))
                yield self._piece([said | self._origins(generation)])

    def _finish_reason(self, generation: Generation) -> str:
        has_called = self._said.calls and generation.reason is FinishReason.STOP
        return "tool_calls" if has_called else generation.finish_reason

    async def _logprobs(self, generation: Generation) -> dict[str, Any] | None:
        """Return log-probabilities of the tokens since the last call."""
        tokens, generation.placed = generation.placed, []
        if not tokens:
            return None
        texts = await self._served.token_texts(ids_in(tokens))
        return of_chat(tokens, texts) if self._kind.is_chat else of_completion(tokens, texts)

    def _origins(self, generation: Generation) -> dict[str, Any]:
        """Return origins of the tokens since the last call, if they were requested."""
        tokens, generation.kept = generation.kept, []
        return of_tokens(tokens, self._served.engine.spec.n_layers) if self._asked.has_origins else {}

    def _piece(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self._asked.has_usage else {}
        return event({**self._head, "object": self._kind.piece, "choices": choices, **usage, **more})


def _message(said: Said) -> dict[str, Any]:
    content = None if said.calls and not said.content else said.content
    calls = [
        {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
        for each in said.calls
    ]
    thought = {"reasoning_content": said.thought} if said.thought else {}
    more: dict[str, Any] = {"tool_calls": calls} if calls else {}
    return {"role": "assistant", "content": content, "refusal": None, **thought, **more}


def _delta(piece: Piece, said: Said) -> dict[str, Any]:
    if piece.kind == SAID:
        return {"content": piece.text}
    if piece.kind == THOUGHT:
        return {"reasoning_content": piece.text}
    if piece.kind == ARGUMENTS:
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
    function = {"name": piece.text, "arguments": ""}
    call_id = said.calls[piece.index].id
    return {"tool_calls": [{"index": piece.index, "id": call_id, "type": "function", "function": function}]}


async def _answer(
    request: Request, answer: _Answer, generations: Sequence[Generation], served: ServedModel
) -> Response:
    if answer.is_stream:
        return EventStream(answer.events(generations, served.settings.ping_s), generations)
    return JSONResponse(await until_gone(request, answer.whole(generations), generations))


def _started(
    prompts: Sequence[tuple[list[int], Echo | None]], asked: _Asked, params: SamplingParams, served: ServedModel
) -> list[Generation]:
    """Queue the texts of each prompt. The first gets the request's seed, the others the following ones.

    Raises:
        BusyError: if the queue is full.
    """
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
    """Check that all texts can run and wait at a time.

    Raises:
        RequestError: if there are too many.
    """
    most = served.settings.n_slots + served.settings.queue_size
    if n_prompts > most:
        fields.refuse("prompt", f"holds {n_prompts} prompts; expected at most {most}, as may run and wait at a time")
    if not 1 <= n_each <= most // n_prompts:
        fields.refuse("n", f"is {shown(n_each)}; expected 1 to {most // n_prompts}, as may run and wait at a time")


def _offered(n_logprobs: int | None, fields: Fields, served: ServedModel) -> int | None:
    """Return `n_logprobs` unchanged.

    Raises:
        RequestError: if this model's mode has no log-probabilities.
    """
    if n_logprobs is not None and served.engine.exits is not None:
        fields.refuse("logprobs", f"is {shown(fields.values['logprobs'])}; {NO_LOGPROBS}", code="unsupported_parameter")
    return n_logprobs


def _prompts(fields: Fields) -> list[Any]:
    """Return the prompts, each a text or a list of token ids."""
    prompt = fields.values.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return prompt
    if not isinstance(prompt, str | list):
        fields.refuse("prompt", "is missing; expected text, or a list of token ids")
    return [prompt]


def _timings(generations: Sequence[Generation]) -> dict[str, Any]:
    """Return the timings of a single text. Timings of parallel texts would mean little."""
    return {"timings": generations[0].timings()} if len(generations) == 1 else {}


def _usage(generations: Sequence[Generation], n_each: int) -> dict[str, Any]:
    """Return the usage of texts, of which every `n_each` share a prompt."""
    n_prompt = sum(each.n_prompt_tokens for each in generations[::n_each])
    n_tokens = sum(each.n_tokens for each in generations)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_tokens,
        "total_tokens": n_prompt + n_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(each.n_cached_tokens for each in generations[::n_each])},
    }
