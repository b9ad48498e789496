"""Messages of a conversation, as OpenAI's and Anthropic's clients send them."""

from hetero_ee.errors import shown
from hetero_ee.serving.body import Fields
from hetero_ee.serving.errors import RequestError
from hetero_ee.text.chat_template import Message

OPENAI_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
ANTHROPIC_ROLES = {"user": "user", "assistant": "assistant"}
CALLS = "this server has no tools; leave it out"


def openai_messages(fields: Fields) -> list[Message]:
    """Raises RequestError for what is no text."""
    return _messages(fields, OPENAI_ROLES)


def anthropic_messages(fields: Fields) -> list[Message]:
    """The system's first, where there is one. Raises RequestError for what is no text."""
    messages = _messages(fields, ANTHROPIC_ROLES)
    if messages[-1].role == "assistant":
        fields.refuse("messages", "ends with the assistant's; a reply that has begun already can't be continued here")
    system = [] if fields.values.get("system") is None else [Message("system", _text(fields, "system"))]
    return [*(each for each in system if each.content), *messages]


def _messages(fields: Fields, roles: dict[str, str]) -> list[Message]:
    each = fields.objects("messages")
    if not each:
        fields.refuse("messages", "is empty; expected one message at least")
    return [_message(one, roles) for one in each]


def _message(fields: Fields, roles: dict[str, str]) -> Message:
    role = fields.text("role")
    if role not in roles:
        fields.refuse("role", f"is {shown(role)}; expected {', '.join(roles)}")
    for name in ("tool_calls", "function_call", "audio"):
        fields.refuse_unless(name, ([], {}), CALLS)
    return Message(roles[role], _text(fields, "content"))


def _text(fields: Fields, name: str) -> str:
    """A string, or a list of parts that are text."""
    content = fields.values.get(name)
    if isinstance(content, str):
        return _valid(content, name)
    if not isinstance(content, list):
        fields.refuse(name, f"is {shown(content)}; expected a string, or a list of parts that are text")
    parts = fields.objects(name)
    for part in parts:
        if part.values.get("type") != "text":
            part.refuse("type", f"is {shown(part.values.get('type'))}; this server takes text alone")
    return _valid("".join(part.text("text") or "" for part in parts), name)


def _valid(text: str, name: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode at character {error.start}.", name) from error
    return text
