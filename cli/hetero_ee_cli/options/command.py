"""A command as its users meet it: help in groups, and errors that name the flag as it was typed."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from hetero_ee.config.settings import DEFAULT, FILE, read_settings
from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.options.option import Option

TYPED = "hetero_ee_cli.typed"  # the key of the command's words in typer's context
ARGUMENTS, OPTIONS = "Arguments", "Options"
# The library's names of what options fill, where the option's own name differs.
LIBRARY_NAMES = {
    "ctx_size": "context_tokens",
    "override": "overrides",
    "plan_file": "plan",
    "chat_template_file": "chat_template",
    "model_flag": "model",
}


class HeteroCommand(TyperCommand):
    """typer's, which groups options in rich's panels only, and those are neither quick nor plain in a pipe."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, the command's own options, then its groups."""
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
        """Keeps the words for messages; one like -ngl99 is not read as -n gl99."""
        typed = ctx.meta[TYPED] = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "format_message"):
                self._refuse_run_together(ctx, typed, error)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Runs it. The library's errors name Python's arguments; here they become flags."""
        try:
            return super().invoke(ctx)
        except HeteroError as error:
            flags = {parameter.name: _flags(parameter) for parameter in self.params}
            message = error.spelled(partial(_spelled, words=_words(ctx.meta[TYPED], flags)))
            message = named_as_typed(message, {name: each for name, each in flags.items() if each}, ctx.meta[TYPED])
            error.args = (_source_of_model(ctx.params, message) + message,)
            raise

    def _refuse_run_together(self, ctx: Any, typed: Sequence[str], error: Any) -> None:
        """Raises UsageError where the error is about a word such as -ngl99, whose first letter is another option."""
        known = [flag for parameter in self.params for flag in _flags(parameter)]
        blamed = [*_flags(getattr(error, "param", None)), getattr(error, "option_name", "")]
        for word in typed:
            name = word.partition("=")[0]
            if re.match(r"-[A-Za-z]{2}", word) and name not in known and word[:2] in blamed:
                near = max((flag for flag in known if word.startswith(flag) and len(flag) > 2), key=len, default=None)
                hint = "" if near is None else f" Did you mean {near} {word.removeprefix(near).removeprefix('=')}?"
                raise UsageError(f"there is no option {word}.{hint} See {ctx.command_path} --help.") from error


def _source_of_model(given: Mapping[str, Any], message: str) -> str:
    """What names the model that the message is about, where that is not the command line; then a colon."""
    if "model_flag" not in given or given["model_flag"] or given.get("model"):
        return ""
    settings = read_settings()
    found = settings.resolve("model")
    if found.source == DEFAULT or Path(found.value).name not in message:
        return ""
    return f"model in {settings.file}: " if found.source == FILE else f"{found.source}: "


def named_as_typed(message: str, flags: Mapping[str, Sequence[str]], typed: Sequence[str]) -> str:
    """The message with flags in place of Python's names, each as it was typed.

    flags: of each option, by its parameter's name. A name with an underscore is replaced wherever it stands, others
    only as the subject of the sentence: `seed is -1`.
    """
    words = _words(typed, flags)
    shown = {name: _as_typed(each, words) for name, each in flags.items()}
    names = shown | {LIBRARY_NAMES[name]: shown[name] for name in shown if name in LIBRARY_NAMES}
    subjects = names | {flag: shown[name] for name, each in flags.items() for flag in each}
    message = re.sub(r"^[\w-]+(?= (?:is|holds|has)\b)", lambda found: subjects.get(found[0], found[0]), message)
    return re.sub(r"(?<![\w./'\"-])[a-z]+_[a-z_]+\b", lambda found: names.get(found[0], found[0]), message)


def _words(typed: Sequence[str], flags: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the flags among the typed words, without their values."""
    known = {flag for each in flags.values() for flag in each}
    # A word whose flag is not known by itself is a letter and its value: -c512.
    return [word if word.partition("=")[0] in known else word[:2] for word in typed]


def _spelled(part: object, words: Sequence[str]) -> str:
    """Return an option's flag as it was typed, and other parts of a message as they are."""
    return _as_typed(part.flags, words) if isinstance(part, Option) and part.flags else str(part)


def _as_typed(flags: Sequence[str], typed: Sequence[str]) -> str:
    """`-c / --ctx-size` for who typed -c; the long flag alone for who typed it, or none."""
    long = next((flag for flag in flags if flag.startswith("--")), flags[0])
    given = [flag for flag in flags if flag in {word.partition("=")[0] for word in typed}]
    return long if not given or given[0] == long else f"{given[0]} / {long}"


def _flags(parameter: Any) -> list[str]:
    return [flag for flag in getattr(parameter, "opts", ()) if flag.startswith("-")]
