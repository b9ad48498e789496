"""Pages that are generated, or that promise commands, stay true."""

import importlib.util
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


def test_architecture_names_every_module() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    folders = ["hetero_ee", "kernels", "cpu_ops", "profiles", "cli"]
    modules = [file for folder in folders for file in (ROOT / folder).rglob("*.py") if not file.name.startswith("__")]
    assert len(modules) > 25
    missing = [file.name for file in modules if f"`{file.name}`" not in page]
    assert not missing
