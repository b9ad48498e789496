"""Turns a chat request of any protocol into a prompt and sampling parameters, and selects how its reply is read."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetero_ee.decoding.channels import CHANNEL, END, THINK
from hetero_ee.errors import UsageError, shown
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.serving.errors import RequestError
from hetero_ee.serving.protocols.body import Fields, json_in
from hetero_ee.serving.served_model import ServedModel
from hetero_ee.serving.tools.reply_grammar import ReplyGrammar
from hetero_ee.serving.tools.reply_reader import ReplyReader
from hetero_ee.serving.tools.tool import Tool, ToolUse
from hetero_ee.serving.tools.tool_format import HERMES, ToolFormat, recognised
from hetero_ee.text.chat_template import Message


@dataclass(frozen=True, slots=True)
class Form:
    """A requested form of a reply: either a schema or a grammar."""

    json_schema: str | None = None
    grammar: str | None = None
    field: str = "json_schema"  # the request's field that asks for the form

    @property
    def changes(self) -> dict[str, Any]:
        return {"json_schema": self.json_schema, "grammar": self.grammar}


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat request, ready for generation."""

    prompt_ids: list[int]
    prompt: str  # the text that prompt_ids encode
    params: SamplingParams
    format: ToolFormat | None  # format of calls; None if the reply can't call
    names: tuple[str, ...]  # names of the tools
    thinks: bool  # replies may begin with thoughts
    is_thinking: bool  # the prompt has begun them
    must_call: bool = False  # the reply must contain at least one call
    has_channels: bool = False  # replies may consist of messages that name their channels
    special_texts: Mapping[int, str] = field(default_factory=dict)  # texts of markers that are special tokens

    @property
    def is_plain(self) -> bool:
        """Whether the whole reply is content, without thoughts and calls."""
        return self.format is None and not self.thinks and not self.has_channels

    def reader(self) -> ReplyReader:
        how = {"thinks": self.thinks, "is_thinking": self.is_thinking, "has_channels": self.has_channels}
        return ReplyReader(self.format, self.names, **how)


async def prepared(
    served: ServedModel,
    messages: Sequence[Message],
    params: SamplingParams,
    use: ToolUse,
    form: Form | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Chat:
    """Prepare a chat request. `variables` are passed to the chat template."""
    template = served.template or ""
    known = recognised(template)
    style = known or HERMES
    said = list(messages) if known else _told(messages, use)
    if style.short_ids:
        said = [_with_short_ids(each) for each in said]
    tools = [each.as_variable() for each in use.tools] if known else []
    prompt_ids, text = await served.chat_prompt(said, tools, variables)
    thinks, is_thinking = THINK in template, text.rstrip().endswith(THINK)
    special = served.marker_ids
    names = tuple(each.name for each in use.callable_tools)
    chat = Chat(
        prompt_ids,
        text,
        params,
        style if names else None,
        names,
        thinks,
        is_thinking,
        use.is_required,
        CHANNEL in template,
        {token_id: marker for marker, token_id in special.items() if marker != END},
    )
    return replace(chat, params=await _held(served, chat, use, form, ReplyGrammar(special)))


async def _held(
    served: ServedModel, chat: Chat, use: ToolUse, form: Form | None, grammar: ReplyGrammar
) -> SamplingParams:
    """Return the sampling parameters with a grammar for the reply, if it needs one."""
    how: dict[str, Any] = {"thinks": chat.thinks, "is_thinking": chat.is_thinking}
    schema = None if form is None or form.json_schema is None else json.loads(form.json_schema)
    if chat.format is not None:
        if form is not None and form.grammar is not None:
            raise RequestError(f"{form.field} and tools are both given; leave one of them out.", form.field)
        calls = (
            grammar.of_messages(use, schema) if chat.has_channels else grammar.of_calls(use, chat.format, schema, **how)
        )
        return await constrained(served, chat.params, {"grammar": calls}, "tools" if form is None else form.field)
    if form is None:
        return chat.params
    asked = form.changes
    if schema is not None and chat.has_channels:
        asked = {"grammar": grammar.of_messages(use, schema)}
    elif schema is not None and chat.thinks:
        asked = {"grammar": grammar.of_schema(schema, is_thinking=chat.is_thinking)}
    return await constrained(served, chat.params, asked, form.field)


async def constrained(
    served: ServedModel, params: SamplingParams, changes: Mapping[str, Any], field: str
) -> SamplingParams:
    """Return the parameters with `changes` and compile their grammar. Errors name the request's field `field`."""
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
    """Return an id of nine letters and digits. Equal ids stay equal."""
    is_short = len(call_id) == 9 and call_id.isascii() and call_id.isalnum()
    return call_id if is_short else hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _told(messages: Sequence[Message], use: ToolUse) -> list[Message]:
    """Rewrite the conversation with tools, calls and results as text, for templates without tool support."""
    found: list[Message] = []
    for each in messages:
        if each.role == "tool":
            result = f"<tool_response>\n{each.content}\n</tool_response>"
            if found and found[-1].role == "user" and found[-1].content.endswith("</tool_response>"):
                found[-1] = replace(found[-1], content=f"{found[-1].content}\n{result}")
            else:
                found.append(Message("user", result))
        elif each.tool_calls:
            calls = "\n".join(
                HERMES.head + HERMES.named(call.name) + json.dumps(call.arguments, ensure_ascii=False) + HERMES.tail
                for call in each.tool_calls
            )
            text = f"{each.content}\n{calls}" if each.content else calls
            found.append(Message("assistant", text))
        else:
            found.append(each)
    if not use.tools:
        return found
    explained = _explained(use.tools)
    if found and found[0].role == "system":
        return [replace(found[0], content=f"{found[0].content}\n\n{explained}"), *found[1:]]
    return [Message("system", explained), *found]


def _explained(tools: Sequence[Tool]) -> str:
    described = "\n".join(json.dumps(each.as_variable(), ensure_ascii=False) for each in tools)
    return (
        f"These are functions, each described by JSON:\n{described}\n\nTo call one, write\n"
        f"{HERMES.head}NAME{HERMES.middle}ARGUMENTS{HERMES.tail}\n"
        "with its name and a JSON object of its arguments; the result comes in the next message."
    )


def effort_variables(template: str | None, effort: str | bool | None) -> dict[str, Any]:
    """Return the template variables for a requested reasoning effort.

    Args:
        template: The chat template. An effort for which it has no variable has no effect.
        effort: A level such as "low", "none" to turn thinking off, or a bool.
    """
    known: dict[str, Any] = {} if isinstance(effort, bool) else {"reasoning_effort": effort}
    known["enable_thinking"] = effort not in ("none", False)
    return {} if effort is None else {name: value for name, value in known.items() if name in (template or "")}


ANY_OBJECT = '{"type": "object"}'
NAMES = ("response_format", "json_schema", "guided_json", "grammar", "guided_grammar", "guided_choice")


def asked_form(fields: Fields) -> Form | None:
    found = [(name, form) for name in NAMES if (form := _FORMS[name](fields, name)) is not None]
    if len(found) > 1:
        fields.refuse(found[1][0], f"can't be combined with {found[0][0]}; leave one of them out")
    return found[0][1] if found else None


def schema_form(fields: Fields, kind: Any, schema_of: Fields, name: str) -> Form | None:
    """Return the form that a field of type text, json_object or json_schema requests. `schema_of` has the schema."""
    if kind == "text":
        return None
    if kind == "json_object":
        return _schema(schema_of, "schema", name) or Form(ANY_OBJECT, field=name)
    if kind != "json_schema":
        fields.refuse("type", f"is {shown(kind)}; expected text, json_object or json_schema")
    found = _schema(schema_of, "schema", name)
    if found is None:
        schema_of.refuse("schema", "is missing; expected a JSON Schema")
    return found


def _response_format(fields: Fields, name: str) -> Form | None:
    if fields.values.get(name) is None:
        return None
    asked = fields.inner(name)
    kind = asked.values.get("type")
    return schema_form(asked, kind, asked.inner("json_schema") if kind == "json_schema" else asked, name)


def _schema(fields: Fields, name: str, field: str) -> Form | None:
    """Return the form of a schema, given as object or text. An empty object requests no form, as in llama-server."""
    value = fields.values.get(name)
    if value is None or value == {}:
        return None
    try:
        schema = json_in(value) if isinstance(value, str) else value
    except ValueError as error:
        fields.refuse(name, f"is {shown(value)}, which is not JSON ({error})")
    if not isinstance(schema, dict):
        fields.refuse(name, f"is {shown(value)}; expected a JSON Schema, an object")
    return Form(json.dumps(schema), field=field)


def _grammar(fields: Fields, name: str) -> Form | None:
    text = fields.text(name)
    return Form(grammar=text, field=name) if text else None


def _choice(fields: Fields, name: str) -> Form | None:
    choices = fields.texts(name)
    if not choices:
        return None
    texts = " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
    return Form(grammar=f"start: CHOICE\nCHOICE: {texts}", field=name)  # rules take ten times as long as a terminal


_FORMS = {
    "response_format": _response_format,
    "json_schema": lambda fields, name: _schema(fields, name, name),
    "guided_json": lambda fields, name: _schema(fields, name, name),
    "grammar": _grammar,
    "guided_grammar": _grammar,
    "guided_choice": _choice,
}
