"""The house: what may be imported from where, and what an installed copy holds."""

import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hetero_ee_cli.checks.tested_versions import TESTED_VERSIONS

ROOT = Path(__file__).parents[2]
PACKAGES = ("hetero_ee", "hetero_ee_kernels", "hetero_ee_cpu_ops", "hetero_ee_profiles", "hetero_ee_cli")
HEAVY = ("torch", "transformers", "numpy", "rich", "triton", "numba")


def test_the_four_outer_folders_are_no_packages() -> None:
    """A top-level `kernels` package would break `import transformers` where the PyPI package of that name is."""
    for folder in ("kernels", "cpu_ops", "profiles", "cli"):
        assert not (ROOT / folder / "__init__.py").exists()
        importable = [p.name for p in (ROOT / folder).iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
        assert importable == [f"hetero_ee_{folder}"]
    found = importlib.util.find_spec("kernels")
    assert found is None or found.origin is None or not Path(found.origin).is_relative_to(ROOT)


def test_importing_the_engine_and_the_command_line_loads_nothing_heavy() -> None:
    code = f"import sys, hetero_ee, hetero_ee_cli.app; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_resolve() -> None:
    import hetero_ee

    assert all(getattr(hetero_ee, name) is not None for name in hetero_ee.__all__)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        hetero_ee.nothing_of_the_kind  # noqa: B018


def test_a_tested_version_is_stated_of_every_requirement() -> None:
    """`.ci/run` writes them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (project["optional-dependencies"][extra] for extra in ("gpu", "sentencepiece", "server"))
    needed = [Requirement(line) for line in (*project["dependencies"], *chain.from_iterable(extras))]
    assert {requirement.name for requirement in needed} == TESTED_VERSIONS.keys()
    assert all(requirement.specifier.contains(TESTED_VERSIONS[requirement.name]) for requirement in needed)


@pytest.mark.sample(0)
def test_an_installed_wheel_works_away_from_the_repository(tmp_path: Path) -> None:
    """Builds the wheel, installs it in an empty folder and imports all five packages from there."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, capture_output=True, check=True)
    wheel = next(tmp_path.glob("*.whl"))
    assert wheel.stat().st_size < 30 * 2**20
    names = zipfile.ZipFile(wheel).namelist()
    assert all(f"{package}/py.typed" in names for package in PACKAGES)
    assert "hetero_ee/assets/demo/model.safetensors" in names and "hetero_ee/assets/demo/README.md" in names
    assert {f"hetero_ee/serving/page/assets/{name}" for name in ("index.html", "main.js", "style.css")} <= set(names)
    target = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, capture_output=True, check=True)
    code = f"import {', '.join(PACKAGES)}; print(hetero_ee.__file__); print(hetero_ee.Engine, hetero_ee_cli.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=target,
        env={"PYTHONPATH": str(target), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(target)) and "hetero_ee.engine.Engine" in done.stdout
