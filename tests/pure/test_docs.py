"""Pages that are generated, or that promise commands, stay true."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_line_page_is_what_the_generator_writes() -> None:
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == script("generate_cli_docs").page()


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
