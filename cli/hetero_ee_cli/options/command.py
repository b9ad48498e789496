"""The command class: help in groups, and errors that name each option by the flag that the user typed."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from hetero_ee.config.settings import DEFAULT, FILE, read_settings
from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.options.option import Option
from hetero_ee_cli.options.llama_cpp import NOT_OFFERED

TYPED = "hetero_ee_cli.typed"  # the key of the command's words in typer's context
ARGUMENTS, OPTIONS = "Arguments", "Options"


class HeteroCommand(TyperCommand):
    """A command with help in groups. typer's own groups need rich's panels, which are slow and not plain in a pipe."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the arguments, then of the command's own options, then of its groups."""
        panels: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], OPTIONS: []}
        for parameter in self.get_params(ctx):
            panel = getattr(parameter, "rich_help_panel", None) or OPTIONS
            panel = ARGUMENTS if parameter.param_type_name == "argument" else panel
            if record := parameter.get_help_record(ctx):
                panels.setdefault(panel, []).append(record)
        for title, records in panels.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments and keep them, so that messages can quote them. Reject unknown flags first."""
        ctx.meta[TYPED] = list(args)
        if not ctx.resilient_parsing:  # true during shell completion, when arguments are incomplete
            takes_value = {flag: _takes_value(each) for each in self.get_params(ctx) for flag in _flags(each)}
            for word in _unknown(args, takes_value):
                _refuse(word, takes_value, ctx.command_path)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Errors of the library then name options by the flags that were typed."""
        try:
            return super().invoke(ctx)
        except HeteroError as error:
            known = {flag for parameter in self.params for flag in _flags(parameter)}
            message = error.spelled(partial(as_typed, words=typed_flags(ctx.meta[TYPED], known)))
            error.args = (_source_of_model(ctx.params, message) + message,)
            raise


def _unknown(args: Sequence[str], takes_value: Mapping[str, bool]) -> Iterator[str]:
    """Yield the words that look like flags but are not in `takes_value`. Values of options are skipped."""
    words = iter(args)
    for word in words:
        name, equals, _ = word.partition("=")
        if word == "--":
            return
        if name in takes_value:
            if takes_value[name] and not equals:
                next(words, None)
        elif word.startswith("-"):
            yield word


def _refuse(word: str, known: Collection[str], command: str) -> None:
    """Reject an unknown flag with advice, if it is a llama.cpp flag or has several letters after one dash (-ngl99).

    Click would read the latter as a group of one-letter flags. Other words, such as -c512, are left to Click.

    Args:
        known: all flags of the command; the closest one is suggested.

    Raises:
        UsageError: if the word is such a flag.
    """
    name = word.partition("=")[0]
    if name in NOT_OFFERED:
        raise UsageError(f"{name} is not offered: {NOT_OFFERED[name]}.")
    if re.match(r"-[A-Za-z]{2}", word):
        near = max((flag for flag in known if word.startswith(flag) and len(flag) > 2), key=len, default=None)
        if near is not None and word.removeprefix(near).isalpha():  # -mdemo is rather -m than -md
            near = None
        hint = "" if near is None else f" Did you mean {near} {word.removeprefix(near).removeprefix('=')}?"
        raise UsageError(f"there is no option {word}.{hint} See {command} --help.")


def _source_of_model(given: Mapping[str, Any], message: str) -> str:
    """Return the setting that names the model and a colon if the message is about that model, else an empty string."""
    if "model_flag" not in given or given["model_flag"] or given.get("model"):
        return ""
    settings = read_settings()
    found = settings.resolve("model")
    if found.source == DEFAULT or Path(found.value).name not in message:
        return ""
    return f"model in {settings.file}: " if found.source == FILE else f"{found.source}: "


def typed_flags(typed: Sequence[str], known: Collection[str]) -> set[str]:
    """Return the flags among the typed words, without their values."""
    # A word whose flag is not known by itself is a letter and its value: -c512.
    names = [(word.partition("=")[0], word[:2]) for word in typed]
    return {name if name in known else letter for name, letter in names}


def as_typed(option: object, words: Collection[str]) -> str:
    """Return `-c / --ctx-size` if -c was typed, else the long flag. Options without flags keep their names."""
    if not isinstance(option, Option) or not option.flags:
        return str(option)
    given = next((flag for flag in (*option.flags, *option.file_flags) if flag in words), option.flag)
    return given if given == option.flag or given in option.file_flags else f"{given} / {option.flag}"


def _takes_value(option: Any) -> bool:
    return not (option.is_flag or option.count)


def _flags(parameter: Any) -> list[str]:
    return [flag for flag in (*parameter.opts, *parameter.secondary_opts) if flag.startswith("-")]
