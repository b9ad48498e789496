"""`hetero-ee chat`: a conversation with a model on a terminal or through a pipe."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from hetero_ee.errors import HeteroError, UsageError, shown
from hetero_ee_cli.options.engine import ModelArgument, ModelOptions
from hetero_ee_cli.options.flags import with_options
from hetero_ee_cli.options.placement import LimitOptions, PlacementOptions, Session, session
from hetero_ee_cli.options.prompt import PromptOptions
from hetero_ee_cli.options.sampling import SamplingOptions, new_seed
from hetero_ee_cli.reports.run_report import closing_lines
from hetero_ee_cli.terminal.chat_file import load_chat, save_chat
from hetero_ee_cli.terminal.chat_input import PROMPT, Command, ReadLine, piped_lines, read_entry
from hetero_ee_cli.terminal.output import complain, echo_prompt, print_tokens, printable, say
from hetero_ee_cli.terminal.text_file import read_text

if TYPE_CHECKING:
    from hetero_ee.decoding.conversation import Conversation, Reply

COMMANDS = {
    "/clear": "forget all messages",
    "/exit": "end the chat, as do Ctrl-D and /quit",
    "/help": "show this list",
    "/load": "continue the chat in the file that follows, with its sampling options",
    "/quit": "end the chat",
    "/regen": "replace the last reply with another",
    "/save": "save messages and sampling options to the file that follows",
    "/stats": "show messages, tokens and memory",
    "/system": "set the system message to the text that follows; without text, remove it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options for the start of a conversation and its chat template."""

    PANEL: ClassVar[str] = "Conversation"

    system: Annotated[
        str | None,
        typer.Option(
            "-sys", "--system", "--system-prompt", help="Instructions for the model, before the first message."
        ),
    ] = None
    chat_template_file: Annotated[
        Path | None, typer.Option(help="Jinja chat template to use instead of the model's own.")
    ] = None

    def template(self) -> str | None:
        """The text in the template's file, or None without a file."""
        return None if self.chat_template_file is None else read_text("chat template", self.chat_template_file)


@with_options()
def chat(
    engine: ModelOptions,
    prompts: PromptOptions,
    conversation: ChatOptions,
    sampling: SamplingOptions,
    limits: LimitOptions,
    placement: PlacementOptions,
    model: ModelArgument = None,
) -> None:
    """Chat with a model. Only its replies go to standard output.

    A line is a message; one that ends in a backslash continues on the next, and lines between two \"\"\" are one
    message. A line that begins with a slash is a command: /help lists them. Ctrl-C stops a reply; pressed twice at
    the prompt, it ends the chat, as do /exit and Ctrl-D. In a pipe, every line is a turn, and each reply ends with a
    newline. --prompt and --file give the first message.
    """
    first, template, changes = prompts.given(), conversation.template(), sampling.changes(escapes=prompts.escape)
    with (
        session(engine, model, limits, placement, announces=True) as opened,
        opened.engine.chat(conversation.system, chat_template=template, **changes) as talk,
    ):
        converse(opened, talk, first, has_seed=sampling.has_seed)


def converse(session: Session, conversation: "Conversation", first: str | None = None, *, has_seed: bool) -> None:
    """Answer messages and commands from a terminal or pipe until its end. `first` is an additional first message."""
    if not sys.stdin.isatty():
        Talk(session, conversation, is_interactive=False, has_seed=has_seed).run(piped_lines(), first)
        return
    from hetero_ee_cli.terminal.line_editor import LineEditor, history_file

    name = printable(session.model or "the demo model")
    say(f"Chat with {name}: /help lists the commands, Ctrl-D ends the chat.")
    with LineEditor(list(COMMANDS), history_file()) as editor:
        Talk(session, conversation, is_interactive=True, has_seed=has_seed).run(editor.read, first)


class Talk:
    """A chat session that answers messages and commands.

    If interactive, it continues after errors. If it has no seed, each turn gets a new one.
    """

    def __init__(self, session: Session, conversation: "Conversation", *, is_interactive: bool, has_seed: bool) -> None:
        self._session, self._conversation = session, conversation
        self._is_interactive, self._has_seed = is_interactive, has_seed
        self._commands: dict[str, Callable[[str], None]] = {
            "/clear": lambda _: conversation.clear(),
            "/help": lambda _: self._help(),
            "/load": self._load,
            "/regen": lambda _: self._regenerate(),
            "/save": self._save,
            "/stats": lambda _: self._stats(),
            "/system": self._set_system,
        }

    def run(self, read_line: ReadLine, first: str | None = None) -> None:
        """Answer messages and commands until the end. `first` is a message that precedes those from read_line.

        Raises:
            KeyboardInterrupt: at the second Ctrl-C at the prompt, or at the first one if not interactive.
        """
        is_leaving = False  # Ctrl-C was pressed once at the prompt
        while True:
            is_reading = True
            try:
                if first is None:
                    entry = read_entry(read_line)
                else:
                    entry, first = first, None
                    if self._is_interactive:
                        echo_prompt(f"{PROMPT}{entry}\n")
                is_reading = is_leaving = False
                if entry is None:
                    break
                if isinstance(entry, Command) and entry.name in ("/exit", "/quit"):
                    return
                self._answer(entry)
            except KeyboardInterrupt:
                if not self._is_interactive or (is_reading and is_leaving):
                    raise
                is_leaving = is_reading
                say("\nPress Ctrl-C again, or type /exit or Ctrl-D, to end the chat." if is_reading else "")
            except HeteroError as error:
                if not self._is_interactive:
                    raise
                complain(str(error))
        if self._is_interactive:
            say("")  # so that the shell's prompt starts on a new line

    def _answer(self, entry: str | Command) -> None:
        if isinstance(entry, str):
            self._print(self._conversation.send(entry, **self._changes()))
        elif entry.name in self._commands:
            self._commands[entry.name](entry.argument)
        else:
            raise UsageError(
                f"there is no command {shown(entry.name)}; /help lists them, and a leading space makes it a message."
            )

    def _changes(self) -> dict[str, Any]:
        """Return the sampling options that differ in this turn."""
        return {} if self._has_seed else {"seed": new_seed()}

    def _print(self, reply: "Reply") -> None:
        if reply.n_forgotten_messages:
            say(f"(The {reply.n_forgotten_messages} oldest messages no longer fit in the context and are forgotten.)")
        start_s = time.perf_counter()
        _, was_interrupted = print_tokens(reply)
        sys.stdout.write("\n")
        sys.stdout.flush()
        if reply.result is not None:
            lead, sampling = "\n" if sys.stdout.isatty() else "", reply.sampling
            report = closing_lines(
                self._session,
                reply.result,
                prompt=f"{reply.n_prefilled_tokens} new + {reply.n_cached_tokens} cached",
                seed=sampling.seed if sampling.temperature else None,
                start_s=start_s,
                is_interrupted=was_interrupted,
            )
            say(lead + report + lead)
        if was_interrupted and not self._is_interactive:
            raise KeyboardInterrupt

    def _regenerate(self) -> None:
        reply = self._conversation.regenerate(**self._changes())
        if reply.sampling.temperature == 0:
            say("(At temperature 0 the reply is always the same; start the chat with --temp for a different one.)")
        self._print(reply)

    def _save(self, name: str) -> None:
        file = save_chat(name, self._session.model or "", self._conversation)
        n_messages = len(self._conversation.messages)
        say(f"({n_messages} message{'s' * (n_messages != 1)} saved to {file}.)")

    def _load(self, name: str) -> None:
        saved, own = load_chat(name, self._conversation), self._session.model or ""
        of, n_messages = f" of a chat with {saved.model or 'the demo model'}", len(saved.messages)
        say(f"({n_messages} message{'s' * (n_messages != 1)}{of if saved.model != own else ''} loaded.)")

    def _set_system(self, text: str) -> None:
        self._conversation.system = text or None

    def _stats(self) -> None:
        from hetero_ee_profiles.host.process import peak_memory_bytes

        talk = self._conversation
        n_messages, is_empty = len(talk.messages), all(each.role == "system" for each in talk.messages)
        n_tokens = 0 if is_empty else talk.n_cached_tokens  # after /clear some are cached for the next message
        say(
            f"{n_messages} message{'s' * (n_messages != 1)}, {n_tokens} of {talk.context_tokens} tokens in the "
            f"context, peak memory {peak_memory_bytes() / 2**30:.2f} GiB"
        )

    def _help(self) -> None:
        for name, meaning in COMMANDS.items():
            say(f"{name:8}  {meaning}")
        say('Lines between two """ are one message; a backslash at the end of a line continues it on the next.')
