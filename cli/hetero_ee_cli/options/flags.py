"""How commands share options: a dataclass states each option once, and typer sees its fields as parameters."""

import functools
import inspect
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args

import typer

Command = Callable[..., None]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def with_options(*, without: Mapping[str, str] | None = None) -> Callable[[Command], Command]:
    """Expands the parameters of a command that are dataclasses: each of their fields becomes an option of the command.

    A field's annotation is what typer needs, Annotated with a typer.Option, and its default is the option's. The class
    attribute PANEL is the heading of its options in the command's help.
    without: fields that the command has no option for, or declares itself, and why; they keep their defaults.
    """
    reasons = dict(without or {})

    def decorate(command: Command) -> Command:
        parameters = list(inspect.signature(command).parameters.values())
        groups: dict[str, Any] = {each.name: each.annotation for each in parameters if is_dataclass(each.annotation)}
        options = [each.replace(kind=each.KEYWORD_ONLY) for each in parameters if each.name not in groups]
        names: dict[str, list[str]] = {}
        for group_name, group in groups.items():
            members = [member for member in fields(group) if member.name not in reasons]
            names[group_name] = [member.name for member in members]
            panel = getattr(group, "PANEL", None)
            options += [_parameter(member.name, _in_panel(member.type, panel), member.default) for member in members]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            built = {key: group(**{name: values.pop(name) for name in names[key]}) for key, group in groups.items()}
            command(**values, **built)

        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in options}
        run.groups, run.without = tuple(groups.values()), reasons  # type: ignore[attr-defined]  # for the flag table
        return run

    return decorate


def _in_panel(annotation: Any, panel: str | None) -> Any:
    if panel is None:
        return annotation
    kind, option = get_args(annotation)
    option = copy(option)
    option.rich_help_panel = panel
    return Annotated[kind, option]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
