"""A chat request of any protocol as a prompt, sampling parameters and a way to read the reply."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetero_ee.errors import UsageError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.serving.errors import RequestError
from hetero_ee.serving.served_model import ServedModel
from hetero_ee.serving.tools.reply_grammar import ReplyGrammar
from hetero_ee.serving.tools.reply_reader import ReplyReader
from hetero_ee.serving.tools.told_tools import told
from hetero_ee.serving.tools.tool import ToolUse
from hetero_ee.serving.tools.tool_format import HERMES, THINK, ToolFormat, recognised
from hetero_ee.text.chat_template import Message


@dataclass(frozen=True, slots=True)
class Form:
    """A requested form of a reply: a schema or a grammar, not both."""

    json_schema: str | None = None
    grammar: str | None = None
    field: str = "json_schema"  # of the request, which asks for it

    @property
    def changes(self) -> dict[str, Any]:
        """The form as changes of sampling parameters."""
        return {"json_schema": self.json_schema, "grammar": self.grammar}


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat request that is ready to be generated."""

    prompt_ids: list[int]
    params: SamplingParams
    format: ToolFormat | None  # of calls, where the reply may hold any
    names: tuple[str, ...]  # of the tools
    thinks: bool  # its template's replies may begin with thoughts
    is_thinking: bool  # the prompt has begun them
    special_texts: Mapping[int, str] = field(default_factory=dict)  # of markers that are special tokens

    @property
    def is_plain(self) -> bool:
        """Whether the whole reply is content, without thoughts or calls."""
        return self.format is None and not self.thinks

    def reader(self) -> ReplyReader:
        """Return a reader for one reply."""
        return ReplyReader(self.format, self.names, thinks=self.thinks, is_thinking=self.is_thinking)


async def prepared(
    served: ServedModel,
    messages: Sequence[Message],
    params: SamplingParams,
    use: ToolUse,
    form: Form | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Chat:
    """Prepare a chat request. `variables` are those of the chat template.

    Raises:
        RequestError: if the form and the tools exclude each other or can't be enforced.
        HeteroError: if the template refuses the messages.
    """
    template = served.template or ""
    known = recognised(template)
    style = known or HERMES
    said = list(messages) if known else told(messages, use)
    if style.short_ids:
        said = [_with_short_ids(each) for each in said]
    tools = [each.as_variable() for each in use.tools] if known else []
    prompt_ids, text = await served.chat_prompt(said, tools, variables)
    thinks, is_thinking = THINK in template, text.rstrip().endswith(THINK)
    special = served.marker_ids
    names = tuple(each.name for each in use.callable_tools)
    chat = Chat(
        prompt_ids,
        params,
        style if names else None,
        names,
        thinks,
        is_thinking,
        {token_id: marker for marker, token_id in special.items()},
    )
    return replace(chat, params=await _held(served, chat, use, form, ReplyGrammar(special)))


async def _held(
    served: ServedModel, chat: Chat, use: ToolUse, form: Form | None, grammar: ReplyGrammar
) -> SamplingParams:
    """Return the sampling parameters with the reply's grammar."""
    how: dict[str, Any] = {"thinks": chat.thinks, "is_thinking": chat.is_thinking}
    schema = None if form is None or form.json_schema is None else json.loads(form.json_schema)
    if chat.format is not None:
        if form is not None and form.grammar is not None:
            raise RequestError(f"{form.field} and tools are both given; leave one of them out.", form.field)
        asked = {"grammar": grammar.of_calls(use, chat.format, schema, **how)}
        return await constrained(served, chat.params, asked, "tools" if form is None else form.field)
    if form is None:
        return chat.params
    if schema is not None and chat.thinks:
        asked = {"grammar": grammar.of_schema(schema, is_thinking=chat.is_thinking)}
    else:
        return await constrained(served, chat.params, form.changes, form.field)
    return await constrained(served, chat.params, asked, form.field)


async def constrained(
    served: ServedModel, params: SamplingParams, changes: Mapping[str, Any], field: str
) -> SamplingParams:
    """Return the parameters with `changes`. `field` is the request's field that asks for the constraint.

    Raises:
        RequestError: if output can't be constrained like that.
    """
    try:
        changed = params.changed(**changes)
        await served.grammars.require(changed)
    except UsageError as error:
        raise RequestError(error.spelled(lambda option: field), field, code="invalid_value") from error
    return changed


def _with_short_ids(message: Message) -> Message:
    calls = tuple(replace(each, id=_short(each.id)) for each in message.tool_calls)
    call_id = None if message.tool_call_id is None else _short(message.tool_call_id)
    return replace(message, tool_calls=calls, tool_call_id=call_id)


def _short(call_id: str) -> str:
    """Return an id of nine letters and digits, always the same for the same `call_id`."""
    is_short = len(call_id) == 9 and call_id.isascii() and call_id.isalnum()
    return call_id if is_short else hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]
