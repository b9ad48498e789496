"""The options that commands share, as a table: a mark where a command has one, a note where it does not and why."""

from functools import cache
from typing import Any

from typer.main import get_command

from hetero_ee_cli.app import app
from hetero_ee_cli.options.flags import option_names

# Which groups of options a command has at least, by what it does.
OPENS, PLANS, WRITES, TALKS = ["Model"], ["Model", "Placement"], ["Text"], ["Conversation"]
RUNS = [*PLANS, "Plan and report", "Prompt"]
GROUPS_OF = {
    "run": [*RUNS, *WRITES, *TALKS],
    "generate": [*RUNS, *WRITES],
    "chat": [*RUNS, *WRITES, *TALKS],
    "serve": [*PLANS, "Plan and report", *WRITES, *TALKS],
    "simulate": [*RUNS, *WRITES, *TALKS],
    "bench": [*PLANS, "Plan and report"],
    "eval": PLANS,
    "plan": PLANS,
    "profile": OPENS,
    "calibrate": OPENS,
    "convert": OPENS,
    "pull": OPENS,
}
NOT_OF_ITS_KIND = "\N{EN DASH}"


def rows() -> list[list[str]]:
    """A head, then a row for each option: its flags, and a cell for each command."""
    groups = {group.PANEL: group for name in GROUPS_OF for group in _callback(name).groups if hasattr(group, "PANEL")}
    table = [["", *GROUPS_OF]]
    for panel, group in groups.items():
        for option in option_names(group):
            table.append([_flags(option), *(_cell(name, panel, option) for name in GROUPS_OF)])
    return table


def notes() -> list[str]:
    """Why options are missing, in the order of their numbers in the table."""
    reasons = [
        reason
        for name in GROUPS_OF
        for option, reason in _callback(name).without.items()
        if option not in _options(name)
    ]
    return list(dict.fromkeys(reasons))


def _cell(command: str, panel: str, option: str) -> str:
    """A mark, the number of a note, or the sign that the command has no use for the group; empty is a hole."""
    if option in _options(command):
        return "x"
    reason = _callback(command).without.get(option)
    if reason is not None:
        return f"({notes().index(reason) + 1})"
    return "" if panel in GROUPS_OF[command] else NOT_OF_ITS_KIND


@cache
def _options(command: str) -> dict[str, Any]:
    """The command's options by the names of their parameters."""
    parameters = get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {each.name: each for each in parameters if each.param_type_name == "option"}


def _callback(command: str) -> Any:
    return next(each.callback for each in app.registered_commands if each.callback.__name__ == command)


def _flags(option: str) -> str:
    found = next(_options(name)[option] for name in GROUPS_OF if option in _options(name))
    return ", ".join(f"`{flag}`" for flag in found.opts)
