"""Chat templates: they turn the messages of a conversation into the text that the model was trained to continue.

A template is code that comes with the model, so it runs in its own process, in jinja2's sandbox, with limits on time,
memory and output; see template_renderer.py. Messages are data and never read as a template.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_ee.errors import ModelError, UsageError, shown

RENDERER = Path(__file__).with_name("template_renderer.py")
MAX_MESSAGE_CHARACTERS = 2**20  # per message of a user
BYTES_PER_CHARACTER = 12  # at most, in ASCII JSON
WAY_OUT = "use another with chat_template, or use hetero-ee generate"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the assistant."""

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
        """Return the message as templates expect it, without absent parts, since templates test for names."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            found["tool_calls"] = [each.as_variable() for each in self.tool_calls]
        others = {"tool_call_id": self.tool_call_id, "name": self.name, "reasoning_content": self.reasoning}
        return found | {name: value for name, value in others.items() if value is not None}


@dataclass(frozen=True, slots=True)
class RenderingLimits:
    """Resources that a template may use."""

    seconds: float = 2.0  # per rendering
    start_seconds: float = 30.0  # for its process to start
    memory_bytes: int = 512 * 2**20
    output_characters: int = 2**20  # in addition to those of the messages
    template_characters: int = 2**20


DEFAULT_LIMITS = RenderingLimits()


class ChatTemplate:
    """One template and the process that renders it, which starts with the first rendering and ends with close().

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
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the conversation up to the beginning of the assistant's reply.

        Args:
            tools: as in OpenAI's requests.
            variables: further variables that the template knows.

        Raises:
            ModelError: if the template is malformed, refuses the messages, or exceeds the sandbox or its limits.
        """
        n_characters = sum(message.n_characters for message in messages) + 4 * len(repr(tools))
        known = {
            "messages": [message.as_variable() for message in messages],
            "tools": tools or None,
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
        """End the process; the next rendering starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # unsent data cannot be flushed
                    pipe.close()
        process.wait()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Exchange one request. Any exception, even Ctrl-C, ends the process, as half an answer may be in its pipe."""
        longest = request["characters"] * BYTES_PER_CHARACTER + 2**16
        try:
            if self._process is None:
                self._start()
            line = self._exchange(json.dumps(request).encode() + b"\n", longest, self._limits.seconds)
            answer: dict[str, str] = json.loads(line)
            return answer
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        command = [sys.executable, "-P", str(RENDERER), str(self._limits.memory_bytes)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        own_group: dict[str, Any] = {"start_new_session": True}  # Ctrl-C in the terminal must not reach the process
        if sys.platform == "win32":
            own_group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, **own_group)
        except OSError as error:
            raise ModelError(f"the process that renders chat templates can't be started ({error}).") from error
        self._exchange(b"", 2**16, self._limits.start_seconds)

    def _exchange(self, request: bytes, longest: int, seconds: float) -> bytes:
        """Write the request and read a line; kill the process if that exceeds `seconds`."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            answer = process.stdout.readline(longest)
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
            timer.join()  # so that it can't kill the process in a later rendering
        if expired.is_set():
            raise ModelError(f"the chat template takes longer than {seconds:g} s to render; {WAY_OUT}.")
        if not answer.endswith(b"\n"):
            raise ModelError(f"the process that renders the chat template has died; {WAY_OUT}.")
        return answer


def _one_line(reason: str) -> str:
    """Return a reason given by the template or jinja2, without control characters."""
    return shown(reason)[1:-1] if not reason.isprintable() else reason
