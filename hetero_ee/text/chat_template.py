"""Chat templates: a conversation's messages become the one text that the model was trained to go on from.

A template is code that comes with the model, so it runs in a process of its own, in jinja2's sandbox, with limits of
time, memory and output; see template_renderer.py. What messages hold is data and is never read as a template.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from hetero_ee.errors import ModelError, shown

RENDERER = Path(__file__).with_name("template_renderer.py")
MAX_MESSAGE_CHARACTERS = 2**20  # of one user's message
BYTES_PER_CHARACTER = 12  # at most, in JSON's ASCII
WAY_OUT = "give another with --chat-template-file, or use hetero-ee generate"


@dataclass(frozen=True, slots=True)
class Message:
    """role: "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class RenderingLimits:
    """What a template may take. seconds: for one rendering. start_seconds: for its process to begin.

    output_characters: beyond those of the messages.
    """

    seconds: float = 2.0
    start_seconds: float = 30.0
    memory_bytes: int = 512 * 2**20
    output_characters: int = 2**20
    template_characters: int = 2**20


DEFAULT_LIMITS = RenderingLimits()


class ChatTemplate:
    """One template and the process that renders it, which starts at the first rendering and ends with close().

    special_tokens: the tokenizer's, by name (bos_token, eos_token, ...). Raises ModelError for a template too large.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], limits: RenderingLimits = DEFAULT_LIMITS
    ) -> None:
        if len(source) > limits.template_characters:
            raise ModelError(
                f"the chat template has {len(source)} characters; at most {limits.template_characters} are read."
            )
        self._source, self._special_tokens, self._limits = source, dict(special_tokens), limits
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text that ends where the assistant's words begin.

        Raises ModelError, in one sentence, for a template that is malformed, refuses the messages, or goes beyond
        the sandbox or its limits.
        """
        n_characters = sum(len(message.content) for message in messages)
        variables = {
            "messages": [asdict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        request = {
            "template": self._source,
            "variables": self._special_tokens | variables,
            "seconds": self._limits.seconds,
            "characters": self._limits.output_characters + n_characters,
        }
        answer = self._ask(request)
        if "refusal" in answer:
            raise ModelError(f"the model's chat template refuses these messages: {_one_line(answer['refusal'])}.")
        if "text" not in answer:
            raise ModelError(f"the chat template can't be used ({_one_line(answer.get('defect', ''))}); {WAY_OUT}.")
        return _text(answer["text"])

    def close(self) -> None:
        """Ends the process; the next rendering would start another."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                _close_quietly(pipe)
        process.wait()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Whatever goes wrong in here, Ctrl-C included, ends the process: half an answer may be in its pipe."""
        longest = request["characters"] * BYTES_PER_CHARACTER + 2**16
        try:
            if self._process is None:
                self._start()
            answer = self._exchange(json.dumps(request).encode() + b"\n", longest, self._limits.seconds)
            decoded: dict[str, str] = json.loads(answer)
            return decoded
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        command = [sys.executable, "-P", str(RENDERER), str(self._limits.memory_bytes)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        try:
            if sys.platform == "win32":
                group = subprocess.CREATE_NEW_PROCESS_GROUP  # a Ctrl-C in the terminal is for us alone
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, creationflags=group)
            else:
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True)
        except OSError as error:
            raise ModelError(f"the process that renders chat templates can't be started ({error}).") from error
        self._process = process
        self._exchange(b"", 2**16, self._limits.start_seconds)

    def _exchange(self, request: bytes, longest: int, seconds: float) -> bytes:
        """Writes the request, reads a line; kills the process where that takes longer than `seconds`."""
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
            timer.join()  # so that it can't kill in a later rendering
        if expired.is_set():
            raise ModelError(f"the chat template takes longer than {seconds:g} s to render; {WAY_OUT}.")
        if not answer.endswith(b"\n"):
            raise ModelError(f"the chat template ended the process that renders it; {WAY_OUT}.")
        return answer


def _text(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ModelError(
            f"the chat template makes text that is not valid Unicode at character {error.start}."
        ) from error
    return text


def _one_line(reason: str) -> str:
    """What a template or jinja2 says, without control characters."""
    return shown(reason)[1:-1] if not reason.isprintable() else reason


def _close_quietly(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except OSError:  # what could not be flushed any more
        return
