"""Tests the tests: they must fail if a barrier, an offset, a shuffle or a matrix product's operands are changed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.gpu.ptx.launcher import ONLY_HERE, Launcher, Program
from tests.gpu.ptx.parsing import PtxError
from tests.gpu.ptx.test_kernels import MORE, QUICK, run

pytestmark = [ONLY_HERE, pytest.mark.slow]
QUIET = ("activate", "embed", "rope")  # their threads work alone
CASES: dict[str, list[tuple[Any, ...]]] = {case[0]: [case] for case in QUICK if case[0] not in QUIET}
CASES["matmul"] += [("matmul", "products_equal_float64", "codebook", (70, 1100, m)) for m in (8, 16)]
CASES["kv_write"] = [case for case in MORE if case[0] == "kv_write"]
for _file in ("draft", "sparse_ffn"):
    CASES[_file] += [case for case in MORE if case[0] == _file]
CASES["draft"] += [("draft", "the_network_judges_the_four_largest", n, 33, "") for n in (500, 1536, 40000)]
CASES["draft"] += [("draft", "the_largest_and_its_probability", 40000)]
CASES["draft"] += [
    ("draft", "the_largest_are_found_in_every_thread", n_pieces, h) for n_pieces in (1, 3, 10, 79) for h in (None, 33)
]
CASES["attention"].append(("attention", "what_is_not_finite_spoils_no_row_that_does_not_see_it", "fp16"))
CASES["sparse_ffn"] += [("sparse_ffn", "bits_of_any_shape_are_the_definitions", (70, 192), 2, True)]
CHANGES = {  # kind: (places, what changes there, replacement)
    "barrier": (r"bar\.sync\s+0;", ".*", ""),
    "offset": (r"(?:ld|st)\.(?:global|shared)\S* [^;]*\[%r\w+\+\d+\]", r"\+\d+\]", "]"),
    "shuffle": (r"(?:shfl\.sync\.bfly[^;]*;\s*)+", r", \d+, 31", ", 0, 31"),  # both halves of 64 bits
    "rows": (r"mma\.sync\S*\s+\{[^}]*\},\s*\{\s*\S+,\s\S+,", r"\{\s*(\S+),\s(\S+),$", r"{\2, \1,"),
    "columns": (
        r"mma\.sync\S*\s+\{[^}]*\},\s*\{[^}]*\},\s*\{\s*\S+,\s\S+\s*\}",
        r"\{\s*(\S+),\s(\S+)\s*\}$",
        r"{\2, \1}",
    ),
    "transpose": (r"ldmatrix\S*\.trans", r"\.trans", ""),
}
FAULT = "ld.global.b8 fault, [0];"  # shows whether the place of a mutant that survived is executed
COPIES = r"\g<0> setp.ne.b32 unlike, \1, \2; @unlike ld.global.b8 fault, [0];"  # fails if a shuffle changes a value
EXPLAINED = {
    "list_kernel: barrier": "it follows the last access to shared memory",
    # Round i finds the i-th of four largest logits. Pieces are in order of their largest ones, so those after the i-th
    # can't have it. With 10 pieces, exactly the 18 shuffles of later pieces survive, of 48 (all were tried).
    "rows_kernel: shuffle": "round i needs no maxima of pieces after the i-th, or that don't exist",
}
OF_EACH = 4  # mutants per kind and kernel at most


def mutants(text: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield names and changed PTX, at most OF_EACH of each kind, spread over the kernel.

    And PTX that fails if the changed place is executed ("fault"), or if a shuffle there changes a value ("copies").
    """
    text = re.sub(r"\.reg", ".reg .b32 fault; .reg .pred unlike; .reg", text, count=1)
    for kind, (pattern, changed, replacement) in CHANGES.items():
        places = list(re.finditer(pattern, text))
        for place in places[:: max(1, -(-len(places) // OF_EACH))]:
            before, after = text[: place.start()], text[place.end() :]
            name, mutant = f"{kind} in line {before.count(chr(10)) + 1}", re.sub(changed, replacement, place[0])
            checks = {"fault": before + FAULT + place[0] + after}
            if kind == "shuffle":
                exchanged = r"shfl\.sync\.bfly\.b32\s+(\S+), (\S+), \d+, 31, -1;"
                checks["copies"] = before + re.sub(exchanged, COPIES, place[0]) + after
            yield name, before + mutant + after, checks


def fails(case: Any, launcher: Launcher) -> bool:
    try:
        with launcher.installed():
            run(case)
    except (PtxError, AssertionError):
        return True
    return False


@pytest.mark.parametrize("file", CASES)
def test_mutants_fail(file: str, run_folder: Path) -> None:
    """Each mutant fails in one of the cases that launch its kernel, unless none of them executes the changed place."""
    original, users = Launcher(86, run_folder / "ptx"), dict[Program, list[Any]]()
    for case in CASES[file]:
        original.launches.clear()
        assert not fails(case, original)
        for program in dict.fromkeys(launch.program for launch in original.launches):
            users.setdefault(program, []).append(case)

    def is_caught(program: Program, text: str) -> bool:
        changed = Launcher(86, run_folder / "ptx", change=lambda given: text if given == program.text else given)
        return any(fails(case, changed) for case in users[program])

    n_caught, survivors = 0, dict[str, str]()
    for program in users:
        if program.kernel.name == "kv_write_kernel" and file != "kv_write":
            continue  # what it writes is the reference of attention
        for kind, text, checks in mutants(program.text):
            name = f"{program.kernel.name}: {kind}"
            if is_caught(program, text):
                n_caught += 1
            elif is_caught(program, checks["fault"]):
                same = "copies" in checks and not is_caught(program, checks["copies"])
                known = (reason for start, reason in EXPLAINED.items() if name.startswith(start))
                survivors[name] = "the lanes hold copies" if same else next(known, "")
    print(f"{n_caught} mutants fail; survivors: {survivors}")
    assert n_caught and all(survivors.values())
