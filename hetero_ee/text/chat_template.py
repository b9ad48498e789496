"""Chat templates: they turn the messages of a conversation into the text that the model was trained to continue.

A template is code that comes with the model, so it runs in a process of its own, in jinja2's sandbox, with limits on
time, memory and output; see template_renderer.py. Messages are data and never read as a template.
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
MAX_MESSAGE_CHARACTERS = 2**20  # of one user's message
BYTES_PER_CHARACTER = 12  # at most, in JSON's ASCII
WAY_OUT = "use another with chat_template, or use hetero-ee generate"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What an assistant's message asks a tool."""

    id: str
    name: str
    arguments: Any  # as JSON has them, an object

    def as_variable(self) -> dict[str, Any]:
        """As templates know it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str  # "system", "user", "assistant" or "tool"
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None  # of a tool's
    name: str | None = None  # the tool's
    reasoning: str | None = None  # what the assistant thought before

    @property
    def n_characters(self) -> int:
        """About as many as it brings into a prompt."""
        return len(self.content) + len(self.reasoning or "") + sum(len(repr(each)) for each in self.tool_calls)

    def as_variable(self) -> dict[str, Any]:
        """As templates know it; they ask for what is not there by name, so that it is left out."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            found["tool_calls"] = [each.as_variable() for each in self.tool_calls]
        others = {"tool_call_id": self.tool_call_id, "name": self.name, "reasoning_content": self.reasoning}
        return found | {name: value for name, value in others.items() if value is not None}


@dataclass(frozen=True, slots=True)
class RenderingLimits:
    """What a template may use."""

    seconds: float = 2.0  # for one rendering
    start_seconds: float = 30.0  # for its process to start
    memory_bytes: int = 512 * 2**20
    output_characters: int = 2**20  # beyond those of the messages
    template_characters: int = 2**20


DEFAULT_LIMITS = RenderingLimits()


class ChatTemplate:
    """One template and the process that renders it, which starts with the first rendering and ends with close().

    special_tokens: the tokenizer's, by name (bos_token, eos_token, ...). Raises ModelError if the template is too long,
    UsageError where it is no text.
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
        """The conversation as text, up to where the assistant's reply begins. tools: as OpenAI's requests have them.
        variables: of the template's own.

        Raises ModelError for a template that is malformed, refuses the messages, or exceeds the sandbox or its limits.
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
        """Ends the process; the next rendering starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what could no longer be flushed
                    pipe.close()
        process.wait()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Any exception in here, Ctrl-C included, ends the process: half an answer may be in its pipe."""
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
        """Writes the request and reads a line; kills the process if that takes longer than `seconds`."""
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
    """A reason given by the template or jinja2, without control characters."""
    return shown(reason)[1:-1] if not reason.isprintable() else reason
