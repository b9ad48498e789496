"""Lets commands share options: a group defines or names each option once, and typer sees its options as parameters.

Completion runs each time the user presses Tab, so nothing slow is imported.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, ClassVar, get_args

import typer

from hetero_ee.config import cache_folder
from hetero_ee.errors import HeteroError
from hetero_ee.options.option import Option
from hetero_ee.weights.store.names import MANIFEST_FILE, STORES_FOLDER

Command = Callable[..., None]
Completion = Callable[[str], list[str]]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


class OptionGroup:
    """A group of library options for a command. `given` holds the options that the user typed, by name."""

    PANEL: ClassVar[str]
    OPTIONS: ClassVar[Mapping[str, Option]]
    COMPLETIONS: ClassVar[Mapping[str, Completion]] = {}

    def __init__(self, **given: Any) -> None:
        self.given = {name: value for name, value in given.items() if value is not None and value != []}


def one_of(values: Sequence[str]) -> Completion:
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def model_names(incomplete: str) -> list[str]:
    """Return the names of converted models in the cache folder that complete the input."""
    try:
        found = sorted(file.parent.name for file in (cache_folder() / STORES_FOLDER).glob(f"*/{MANIFEST_FILE}"))
    except (HeteroError, OSError):  # completion never complains
        return []
    return one_of(found)(incomplete)


def hardware_names(incomplete: str) -> list[str]:
    """Return the names of shipped profiles that complete the input."""
    from hetero_ee_profiles.reference import reference_names

    return one_of(reference_names())(incomplete)


def shape_names(incomplete: str) -> list[str]:
    """Return the names of models with known shapes that complete the input."""
    from hetero_ee.models.known_shapes import known_shapes

    return one_of(tuple(known_shapes()))(incomplete)


def with_options(*, without: Mapping[str, str] | None = None) -> Callable[[Command], Command]:
    """Replace a command's parameters that are groups: each option of a group becomes an option of the command.

    A group is an `OptionGroup`, or a dataclass whose fields are Annotated with a typer.Option. The class attribute
    PANEL is the heading of its options in the command's help. A group without PANEL belongs to a single command.

    Args:
        without: Options that the command lacks or declares itself, with the reasons. They keep their defaults.
    """
    reasons = dict(without or {})

    def decorate(command: Command) -> Command:
        parameters = list(inspect.signature(command).parameters.values())
        groups = {each.name: each.annotation for each in parameters if _is_group(each.annotation)}
        options = [each.replace(kind=each.KEYWORD_ONLY) for each in parameters if each.name not in groups]
        names: dict[str, list[str]] = {}
        for group_name, group in groups.items():
            hidden = reasons if hasattr(group, "PANEL") else ()  # a command's own group has all of its options
            members = [member for member in _members(group) if member.name not in hidden]
            names[group_name] = [member.name for member in members]
            options += members

        @functools.wraps(command)
        def run(**values: Any) -> None:
            built = {key: group(**{name: values.pop(name) for name in names[key]}) for key, group in groups.items()}
            command(**values, **built)

        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in options}
        run.groups, run.without = tuple(groups.values()), reasons  # type: ignore[attr-defined]  # for the flag table
        return run

    return decorate


def option_names(group: Any) -> list[str]:
    return [member.name for member in _members(group)]


def typer_option(option: Option, completion: Completion | None = None) -> Any:
    complete = completion or (one_of(option.choices) if option.choices else None)
    return typer.Option(*option.flags, help=option.full_help, metavar=option.metavar, autocompletion=complete)


def _is_group(annotation: Any) -> bool:
    return is_dataclass(annotation) or (isinstance(annotation, type) and issubclass(annotation, OptionGroup))


def _members(group: Any) -> Iterator[inspect.Parameter]:
    if is_dataclass(group):
        stated = [(member.name, member.type, member.default) for member in fields(group)]
    else:
        completions = group.COMPLETIONS
        stated = [
            (name, Annotated[(each.typed or each.kind) | None, typer_option(each, completions.get(name))], None)
            for name, each in group.OPTIONS.items()
        ]
    panel = getattr(group, "PANEL", None)
    for name, annotation, default in stated:
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name, kind, default=default, annotation=_in_panel(annotation, panel))


def _in_panel(annotation: Any, panel: str | None) -> Any:
    if panel is None:
        return annotation
    kind, option = get_args(annotation)
    option = copy(option)
    option.rich_help_panel = panel
    return Annotated[kind, option]
