"""`hetero-ee run`: chats if the model has a chat template, else continues a text."""

import sys
import time

from hetero_ee.errors import UsageError
from hetero_ee_cli.commands.chat import ChatOptions, Talk, TalkStyle, converse
from hetero_ee_cli.commands.generate import Continuing
from hetero_ee_cli.options.engine import ModelArgument, ModelOptions
from hetero_ee_cli.options.flags import with_options
from hetero_ee_cli.options.placement import PlacementOptions, open_engine
from hetero_ee_cli.options.planning import LimitOptions
from hetero_ee_cli.options.prompt import STANDARD_INPUT, PromptArgument, PromptOptions
from hetero_ee_cli.options.sampling import SamplingOptions
from hetero_ee_cli.terminal.progress import stage_progress


@with_options()
def run(
    engine: ModelOptions,
    prompts: PromptOptions,
    conversation: ChatOptions,
    sampling: SamplingOptions,
    limits: LimitOptions,
    placement: PlacementOptions,
    model: ModelArgument = None,
    argument: PromptArgument = None,
) -> None:
    """Run a model: chat with it if it has a chat template, else continue a text. Downloads and converts it if needed.

    With a prompt, it is answered and the command ends; without one, the chat goes on until /exit or Ctrl-D.
    """
    if engine.given.get("model_flag") is not None and argument is None:
        model, argument = None, model  # the only argument, next to --model
    text, template = prompts.given(argument), conversation.template()
    placed = placement.checked(limits, engine)
    options, changes = engine.arguments(model), sampling.changes()
    start_s = time.perf_counter()
    with stage_progress() as progress, open_engine(options, placed, progress) as opened:
        load_s = time.perf_counter() - start_s
        try:
            if template is None and not opened.has_chat_template:
                if text is None:
                    text = _piped_prompt(prompts)
                Continuing(opened, options["model"], changes, placement, load_s).write(text)
                return
            style = TalkStyle(placement, load_s, has_seed=sampling.has_seed)
            with opened.chat(conversation.system, chat_template=template, **changes) as talk:
                if text is None:
                    converse(opened, talk, options["model"], style, None)
                else:
                    Talk(opened, talk, is_interactive=False, style=style).run(lambda _: None, text)
        finally:
            placement.write_trace_of(opened)


def _piped_prompt(prompts: PromptOptions) -> str:
    """Return the prompt from standard input.

    Raises:
        UsageError: on a terminal, where a prompt has to be given.
    """
    if sys.stdin.isatty():
        raise UsageError("this model has no chat template, so there must be a prompt to continue; give one.")
    return prompts.required(STANDARD_INPUT)
