"""Pages that are generated, or that promise commands, stay true."""

import re
from pathlib import Path
from typing import Any

from typer.main import get_command

from hetero_ee_cli.app import app
from scripts.flag_table import notes, rows

ROOT = Path(__file__).parents[2]


def test_the_command_line_page_has_every_option_with_its_help() -> None:
    """As scripts/generate_cli_docs.py writes them; their layout is typer's, and another with each of its versions."""
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^#+ `(hetero-ee[^`]*)`$(.*?)(?=^#+ `|\Z)", page, re.M | re.S))
    wanted: dict[str, Any] = {}

    def visit(name: str, command: Any) -> None:
        wanted[name] = command
        for inner, each in getattr(command, "commands", {}).items():
            visit(f"{name} {inner}", each)

    visit("hetero-ee", get_command(app))
    assert sections.keys() == wanted.keys() and len(wanted) > 12
    for name, command in wanted.items():
        for parameter in command.params:
            words = [*(option for option in parameter.opts if option.startswith("-")), getattr(parameter, "help", "")]
            assert not [word for word in words if word and word not in sections[name]], (name, parameter.name)


def test_no_command_misses_a_flag_of_its_groups_without_a_reason() -> None:
    """As scripts/flag_table.py prints it; groups are what each command has at least, by what it does."""
    head, *table = rows()
    assert {"run", "generate", "chat", "simulate", "bench", "calibrate", "convert", "pull"} <= set(head)
    assert len(table) > 25 and all(len(cells) == len(head) for cells in table)
    assert not [(cells[0], head[place]) for cells in table for place, cell in enumerate(cells) if not cell and place]
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert not [cells for cells in table if f"| {' | '.join(cells)} |\n" not in page]
    assert not [reason for reason in notes() if f". {reason}\n" not in page]


def test_architecture_names_every_room_and_only_files_that_exist() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    packages = [ROOT / name for name in ("hetero_ee", "kernels", "cpu_ops", "profiles", "cli")]
    rooms = [file.parent.relative_to(ROOT) for package in packages for file in package.rglob("__init__.py")]
    assert len(rooms) > 25
    assert not [room for room in rooms if room != Path("hetero_ee") and f"`{room}/`" not in page]
    files = {str(file.relative_to(ROOT)) for place in (*packages, ROOT / "tests") for file in place.rglob("*.py")}
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    assert len(named) > 20
    assert not [name for name in named if not any(file.endswith(f"/{name}") or file == name for file in files)]
