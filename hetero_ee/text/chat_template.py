"""Render chat templates, which turn the messages of a conversation into the text that a model was trained to continue.

A template is code that comes with the model, so it runs in its own process, in jinja2's sandbox, with limits on time,
memory and output; see template_renderer.py. Messages are data and never read as a template.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_ee.errors import ModelError, UsageError, shown
from hetero_ee.text.child_process import ChildProcess

RENDERER = Path(__file__).with_name("template_renderer.py")
MAX_MESSAGE_CHARACTERS = 2**20  # per message of a user
BYTES_PER_CHARACTER = 12  # at most, in ASCII JSON
WAY_OUT = "use another with chat_template, or use hetero-ee generate"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the assistant requests."""

    id: str
    name: str
    arguments: Any  # a JSON object

    def as_variable(self) -> dict[str, Any]:
        """Return the call in the form that templates expect."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str  # "system", "user", "assistant" or "tool"
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None  # of a tool's message
    name: str | None = None  # the tool's name
    reasoning: str | None = None  # the assistant's thoughts before the content

    @property
    def n_characters(self) -> int:
        """Approximate number of characters that the message adds to a prompt."""
        return len(self.content) + len(self.reasoning or "") + sum(len(repr(each)) for each in self.tool_calls)

    def as_variable(self) -> dict[str, Any]:
        """Return the message as templates expect it, without absent parts, since templates test for their names."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            found["tool_calls"] = [each.as_variable() for each in self.tool_calls]
        if self.tool_calls and self.reasoning and not self.content:
            found["thinking"] = self.reasoning  # gpt-oss's name for it, not accepted together with content
        others = {"tool_call_id": self.tool_call_id, "name": self.name, "reasoning_content": self.reasoning}
        return found | {name: value for name, value in others.items() if value is not None}


@dataclass(frozen=True, slots=True)
class RenderingLimits:
    """Limits of the time, memory and output of a template."""

    seconds: float = 2.0  # limit per rendering
    start_seconds: float = 30.0  # limit for the start of the process
    memory_bytes: int = 512 * 2**20
    output_characters: int = 2**20  # in addition to those of the messages
    template_characters: int = 2**20


DEFAULT_LIMITS = RenderingLimits()


class ChatTemplate:
    """A chat template and the process that renders it. The first rendering starts the process, close() ends it.

    Args:
        special_tokens: the tokenizer's special tokens by name (bos_token, eos_token, ...).

    Raises:
        ModelError: if the template is too long.
        UsageError: if it is not a string.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], limits: RenderingLimits = DEFAULT_LIMITS
    ) -> None:
        if not isinstance(source, str):
            raise UsageError(f"the chat template is {shown(source)}; expected a string.")
        if len(source) > limits.template_characters:
            raise ModelError(
                f"the chat template has {len(source)} characters; at most {limits.template_characters} are supported."
            )
        self._source, self._special_tokens, self._limits = source, dict(special_tokens), limits
        self._process = ChildProcess([str(RENDERER), str(limits.memory_bytes)], limits.start_seconds)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        plain: Callable[[str], str] | None = None,
    ) -> str:
        """Render the conversation up to the beginning of the assistant's reply.

        Args:
            tools: descriptions of tools as in OpenAI's requests.
            variables: further variables for the template.
            plain: changes every text of messages and tools; may make a text a little more than twice as long.

        Raises:
            ModelError: if the template is malformed, refuses the messages, or exceeds the sandbox or its limits.
        """
        n_characters = sum(message.n_characters for message in messages) + 4 * len(repr(tools))
        said = [message.as_variable() for message in messages], list(tools or ())
        if plain is not None:
            n_characters, said = 3 * n_characters, changed_texts(said, plain)
        known = {
            "messages": said[0],
            "tools": said[1] or None,
            "documents": None,
            "add_generation_prompt": True,
        }
        request = {
            "template": self._source,
            "variables": dict(variables or {}) | self._special_tokens | known,
            "seconds": self._limits.seconds,
            "characters": self._limits.output_characters + n_characters,
        }
        answer = self._ask(request)
        if "refusal" in answer:
            raise ModelError(f"the model's chat template refuses these messages: {_one_line(answer['refusal'])}.")
        if "text" not in answer:
            raise ModelError(f"the chat template can't be used ({_one_line(answer.get('defect', ''))}); {WAY_OUT}.")
        text = answer["text"]
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ModelError(f"the chat template's output is not valid Unicode at character {error.start}.") from error
        return text

    def close(self) -> None:
        """End the process. The next rendering starts another one."""
        self._process.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, str]:
        longest = request["characters"] * BYTES_PER_CHARACTER + 2**16
        try:
            answer: dict[str, str] = self._process.ask(request, longest, self._limits.seconds)
            return answer
        except TimeoutError as error:
            raise ModelError(
                f"the chat template takes longer than {self._limits.seconds:g} s to render; {WAY_OUT}."
            ) from error
        except EOFError as error:
            raise ModelError(f"the process that renders the chat template has died; {WAY_OUT}.") from error
        except OSError as error:
            raise ModelError(f"the process that renders chat templates can't be started ({error}).") from error


def changed_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with `change` applied to every text in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): changed_texts(each, change) for name, each in value.items()}
    return [changed_texts(each, change) for each in value] if isinstance(value, list | tuple) else value


def _one_line(reason: str) -> str:
    """Return an error message of the template or jinja2 on one line, without control characters."""
    return shown(reason)[1:-1] if not reason.isprintable() else reason
