"""`hetero-ee chat`: a conversation, in turns, on a terminal or through a pipe."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_ee_cli.options.engine import Revision, engine_options
from hetero_ee_cli.options.placement import (
    DraftHead,
    PlacementOptions,
    PlanFile,
    Stats,
    Trace,
    open_engine,
    placement_options,
    write_spans,
)
from hetero_ee_cli.options.planning import (
    DraftTokens,
    GpuLayers,
    KvType,
    Mode,
    Override,
    VramBudget,
    VramMargin,
)
from hetero_ee_cli.options.sampling import (
    MaxNewTokens,
    MinP,
    RepeatPenalty,
    Seed,
    Stop,
    Temp,
    TopK,
    TopP,
    sampling_changes,
)
from hetero_ee_cli.options.settings import CtxSize, Model, Offline, Quantizer, Threads
from hetero_ee_cli.reports.expectation import Expectation, slowness
from hetero_ee_cli.reports.run_report import mode_words, statistics_table, uses_gpu
from hetero_ee_cli.terminal.chat_input import Command, ReadLine, piped_lines, read_entry
from hetero_ee_cli.terminal.output import closing_line, complain, print_tokens, printable, say
from hetero_ee_cli.terminal.text_file import read_text

if TYPE_CHECKING:
    from hetero_ee.decoding.conversation import Conversation
    from hetero_ee.decoding.reply import Reply
    from hetero_ee.engine import Engine

COMMANDS = {
    "/clear": "forget the messages",
    "/exit": "end the chat, as Ctrl-D and /quit do",
    "/help": "this list",
    "/quit": "end the chat",
    "/regen": "another reply to the last message",
    "/stats": "messages, tokens and memory",
    "/system": "set the system message to the text that follows; without text, drop it",
}


def chat(
    model: Annotated[str | None, typer.Argument(help="The same as --model.")] = None,
    model_flag: Model = None,
    revision: Revision = None,
    offline: Offline = None,
    system: Annotated[
        str | None, typer.Option("-sys", "--system", help="What the model is told before the first message.")
    ] = None,
    chat_template_file: Annotated[
        Path | None, typer.Option(help="Jinja chat template to use in place of the model's own.")
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    temp: Temp = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repeat_penalty: RepeatPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    threads: Threads = None,
    ctx_size: CtxSize = None,
    quantizer: Quantizer = None,
    vram_budget: VramBudget = None,
    vram_margin: VramMargin = None,
    gpu_layers: GpuLayers = None,
    override: Override = None,
    kv_type: KvType = None,
    mode: Mode = None,
    draft_length: DraftTokens = None,
    plan_file: PlanFile = None,
    draft_head: DraftHead = None,
    trace: Trace = None,
    stats: Stats = False,
) -> None:
    """Chat with a model. Only its replies go to standard output.

    A line is a message; one that ends in a backslash goes on in the next, and lines between two \"\"\" are one message.
    A line that begins with a slash is a command: /help lists them. Ctrl-C stops a reply; at the prompt, twice in a row
    ends the chat, as /exit and Ctrl-D do. Through a pipe every line is a turn, and each reply ends with a newline.
    """
    placement = placement_options(
        plan_file=plan_file,
        draft_head=draft_head,
        trace=trace,
        stats=stats,
        vram_budget=vram_budget,
        vram_margin=vram_margin,
        gpu_layers=gpu_layers,
        override=override,
        kv_type=kv_type,
        mode=mode,
        draft_length=draft_length,
        ctx_size=ctx_size,
        threads=threads,
    )
    options = engine_options(
        model=_one_model(model, model_flag),
        revision=revision,
        offline=offline,
        quantizer=quantizer,
        ctx_size=ctx_size,
        threads=threads,
    )
    changes = sampling_changes(
        max_new_tokens=max_new_tokens,
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        seed=seed,
        stop=stop,
    )
    template = None if chat_template_file is None else read_text("chat template", chat_template_file)
    _chat(options, placement, {"system": system, "chat_template": template} | changes)


def _one_model(argument: str | None, flag: str | None) -> str | None:
    from hetero_ee.errors import UsageError, shown

    if argument is not None and flag is not None and argument != flag:
        raise UsageError(f"two models are named, {shown(argument)} and {shown(flag)}; give one.")
    return flag if argument is None else argument


def _chat(options: dict[str, Any], placement: PlacementOptions, conversation_options: dict[str, Any]) -> None:
    """Opens the model and talks until there is nothing more to answer."""
    from hetero_ee_cli.terminal.progress import stage_progress

    with stage_progress() as progress:
        engine = open_engine(options, placement, progress)
    with engine, engine.chat(**conversation_options) as conversation:
        try:
            _talk(engine, conversation, options["model"], placement.stats)
        finally:
            write_spans(engine, placement)


def _talk(engine: "Engine", conversation: "Conversation", model: str | None, stats: bool) -> None:
    """On a terminal or through a pipe."""
    if not sys.stdin.isatty():
        Talk(engine, conversation, is_interactive=False, stats=stats).run(piped_lines())
        return
    from hetero_ee_cli.terminal.line_editor import LineEditor, history_file

    say(f"Chat with {printable(model or 'the demo model')}: /help lists the commands, Ctrl-D ends it.")
    with LineEditor(list(COMMANDS), history_file()) as editor:
        Talk(engine, conversation, is_interactive=True, stats=stats).run(editor.read)


class Talk:
    """Answers entries until they end. Interactive, a refusal is a line and the talk goes on; else it ends the talk.

    stats: whether a table follows each reply.
    """

    def __init__(
        self, engine: "Engine", conversation: "Conversation", is_interactive: bool, stats: bool = False
    ) -> None:
        self._engine, self._expectation, self._stats_wanted = engine, Expectation(engine), stats
        self._conversation, self._is_interactive = conversation, is_interactive
        self._commands: dict[str, Callable[[str], None]] = {
            "/clear": self._clear,
            "/help": self._help,
            "/regen": self._regenerate,
            "/stats": self._stats,
            "/system": self._set_system,
        }

    def run(self, read_line: ReadLine) -> None:
        """Raises KeyboardInterrupt for a second Ctrl-C at the prompt, or for the first where nobody types."""
        from hetero_ee.errors import HeteroError

        is_leaving = False  # one Ctrl-C at the prompt has come
        while True:
            is_reading = True
            try:
                entry = read_entry(read_line)
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
                say("\nCtrl-C again, /exit or Ctrl-D ends the chat." if is_reading else "")
            except HeteroError as error:
                if not self._is_interactive:
                    raise
                complain(str(error))
        if self._is_interactive:
            say("")  # the terminal's next line begins at its beginning

    def _answer(self, entry: str | Command) -> None:
        from hetero_ee.errors import UsageError, shown

        if isinstance(entry, str):
            self._print(self._conversation.send(entry))
        elif entry.name in self._commands:
            self._commands[entry.name](entry.argument)
        else:
            raise UsageError(
                f"there is no command {shown(entry.name)}; /help lists them, and a message may begin with a space."
            )

    def _print(self, reply: "Reply") -> None:
        if reply.n_forgotten_messages:
            say(f"(The {reply.n_forgotten_messages} oldest messages no longer fit into the context and are forgotten.)")
        start_s = time.perf_counter()
        _, was_interrupted = print_tokens(reply)
        sys.stdout.write("\n")
        sys.stdout.flush()
        if reply.result is not None:
            # The reply comes first: measuring a machine that was never measured takes some seconds.
            self._say_how(reply, None if was_interrupted else self._expectation.of(reply.result), start_s)
        if was_interrupted and not self._is_interactive:
            raise KeyboardInterrupt

    def _say_how(self, reply: "Reply", expected: float | None, start_s: float) -> None:
        """The closing line, and whether the context was full. expected: tokens per second."""
        from hetero_ee.decoding.result import FinishReason

        assert reply.result is not None
        if reply.result.finish_reason is FinishReason.CONTEXT:
            say(f"(The context of {self._conversation.context_tokens} tokens is full; the reply ends here.)")
        prompt = f"{reply.n_prefilled_tokens} new + {reply.n_cached_tokens} cached"
        seed = reply.sampling.seed if reply.sampling.temperature else None
        lead = "\n" if sys.stdout.isatty() else ""
        engine, result = self._engine, reply.result
        say(lead + closing_line(prompt, result, seed, expected, mode_words(engine)) + lead)
        if (sentence := slowness(result, expected, uses_gpu(engine))) is not None:
            say(sentence)
        if self._stats_wanted:
            say(statistics_table(engine, result, start_s))

    def _clear(self, _argument: str) -> None:
        self._conversation.clear()

    def _regenerate(self, _argument: str) -> None:
        reply = self._conversation.regenerate()
        if reply.sampling.temperature == 0:
            say("(At temperature 0 the same reply comes again; start the chat with --temp for others.)")
        self._print(reply)

    def _set_system(self, text: str) -> None:
        self._conversation.system = text or None

    def _stats(self, _argument: str) -> None:
        from hetero_ee_profiles.host.process import peak_memory_bytes

        talk = self._conversation
        say(
            f"{len(talk.messages)} messages, {talk.n_cached_tokens} of {talk.context_tokens} tokens in the context, "
            f"peak memory {peak_memory_bytes() / 2**30:.2f} GiB"
        )

    def _help(self, _argument: str) -> None:
        for name, meaning in COMMANDS.items():
            say(f"{name:8}  {meaning}")
        say('Lines between two """ are one message; a backslash at the end of a line goes on in the next.')
