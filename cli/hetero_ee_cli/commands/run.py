"""`hetero-ee run`: chats if the model has a chat template, else continues a text."""

import sys

from hetero_ee.errors import UsageError
from hetero_ee_cli.commands.chat import ChatOptions, Talk, converse
from hetero_ee_cli.commands.generate import continue_text
from hetero_ee_cli.options.engine import ModelArgument, ModelOptions
from hetero_ee_cli.options.flags import with_options
from hetero_ee_cli.options.placement import LimitOptions, PlacementOptions, session
from hetero_ee_cli.options.prompt import STANDARD_INPUT, PromptArgument, PromptOptions
from hetero_ee_cli.options.sampling import SamplingOptions


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
    model, argument = engine.model_and_prompt(model, argument)
    text, template = prompts.given(argument), conversation.template()
    changes = sampling.changes(escapes=prompts.escape)
    with session(engine, model, limits, placement, announces=text is None) as opened:
        if template is None and not opened.engine.has_chat_template:
            continue_text(opened, _piped_prompt(prompts) if text is None else text, changes)
            return
        with opened.engine.chat(conversation.system, chat_template=template, **changes) as talk:
            if text is None:
                converse(opened, talk, has_seed=sampling.has_seed)
            else:
                Talk(opened, talk, is_interactive=False, has_seed=sampling.has_seed).run(lambda _: None, text)


def _piped_prompt(prompts: PromptOptions) -> str:
    """Return the prompt from standard input. On a terminal, an error asks for a prompt."""
    if sys.stdin.isatty():
        raise UsageError("this model has no chat template, so there must be a prompt to continue; give one.")
    return prompts.required(STANDARD_INPUT)
