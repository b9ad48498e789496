"""Tests the tests: they must fail if a barrier, an offset or a matrix product's operands in the PTX are changed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.gpu.ptx.launcher import ONLY_HERE, Launcher
from tests.gpu.ptx.parsing import PtxError
from tests.gpu.ptx.test_kernels import QUICK, name_of, run

pytestmark = [ONLY_HERE, pytest.mark.slow]
# The quick case of the sparse FFN has one block of neurons, so that the barrier between two blocks does nothing there.
CASES = [case for case in QUICK if case[0] != "sparse_ffn"] + [("sparse_ffn", "sections_of_two_blocks", "alternating")]
CASES += [("matmul", "products_equal_float64", "codebook", (70, 1100, m)) for m in (8, 16)]
CHANGES = {  # kind: (pattern, replacement)
    "barrier": (r"bar\.sync\s+0;", ""),
    "offset": (r"((?:ld|st)\.(?:global|shared)\S* [^;]*\[%r\w+)\+16\]", r"\1+32]"),
    "operands": (r"(mma\.sync\S* \{[^}]*\}, )\{(\S+), (\S+),", r"\1{\3, \2,"),
}
OF_EACH = 4  # mutants per kind and kernel at most


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """Yield (name, changed PTX) for a kernel: at most OF_EACH of each kind, spread evenly over the text."""
    for kind, (pattern, replacement) in CHANGES.items():
        places = list(re.finditer(pattern, text))
        for place in places[:: max(1, -(-len(places) // OF_EACH))]:
            line = text.count("\n", 0, place.start()) + 1
            yield f"{kind} in line {line}", text[: place.start()] + place.expand(replacement) + text[place.end() :]


def fails(case: Any, launcher: Launcher) -> bool:
    try:
        with launcher.installed():
            run(case)
    except (PtxError, AssertionError):
        return True
    return False


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_mutants_fail(case: Any, run_folder: Path) -> None:
    original = Launcher(86, run_folder / "ptx")
    assert not fails(case, original)
    n_mutants, survivors = 0, []
    for program in dict.fromkeys(launch.program for launch in original.launches):
        for name, text in mutants(program.text):
            changed = Launcher(86, run_folder / "ptx", change=lambda t, p=program, c=text: c if t == p.text else t)
            n_mutants += 1
            if not fails(case, changed):
                survivors.append(f"{program.kernel.name}: {name}")
    print(f"{n_mutants - len(survivors)} of {n_mutants} mutants fail")
    assert not survivors
