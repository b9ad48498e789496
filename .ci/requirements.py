"""The package's requirements at run time, and the two things CI does with their versions.

`requirements.py oldest` prints the oldest versions that pyproject.toml allows, for pip. Torch is printed without a
version: where CI runs, its older releases have no CPU build (see pyproject.toml).
`requirements.py tested` writes the installed versions, which CI has just tested, to the file that `hetero-ee doctor`
compares with.
"""

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
EXTRAS = ("gpu", "sentencepiece", "server")
TESTED_FILE = ROOT / "cli/hetero_ee_cli/checks/tested_versions.py"


def requirements() -> Iterator[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return map(Requirement, (*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])))


def oldest(needed: Requirement) -> str:
    lower = next(bound.version for bound in needed.specifier if bound.operator == ">=")
    return needed.name if needed.name == "torch" else f"{needed.name}=={lower}"


def tested_file() -> str:
    versions = {needed.name: Version(version(needed.name)).public for needed in requirements()}
    rows = "".join(f'    "{name}": "{versions[name]}",\n' for name in sorted(versions))
    return (
        '"""Newest version of each dependency that CI has tested. This file is written by .ci/requirements.py."""\n\n'
        f"TESTED_VERSIONS = {{\n{rows}}}\n"
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["oldest"]:
            print(*map(oldest, requirements()), sep="\n")
        case ["tested"]:
            TESTED_FILE.write_text(tested_file())
        case _:
            sys.exit(__doc__)
