"""Checks that no kernel executes many more instructions than the table in docs/gpu_kernels.md states."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.gpu.counts.counts import ARCHITECTURE, counted, workloads
from tests.gpu.counts.sass import main_loop
from tests.gpu.ptx.launcher import ONLY_HERE, Launcher

PAGE = Path(__file__).parents[3] / "docs" / "gpu_kernels.md"
GROWTH = 1.1

pytestmark = ONLY_HERE


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", workloads())
def test_instructions_are_those_of_the_page(name: str, run_folder: Path) -> None:
    """After an intended change, run python scripts/generate_gpu_kernel_docs.py --only KERNEL."""
    if f"Triton {version('triton')} " not in PAGE.read_text(encoding="utf-8"):
        pytest.skip("another Triton compiles other instructions")
    listed = re.findall(rf"^\| {re.escape(name)} \| `(\w+)` \| ([\d.]+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    rows = counted(name, Launcher(ARCHITECTURE, run_folder / "ptx"))
    assert [row.kernel for row in rows] == [kernel for kernel, _ in listed]
    for row, (_, instructions) in zip(rows, listed, strict=True):
        assert row.instructions_per_byte <= GROWTH * float(instructions), row


def test_the_main_loop_is_the_longest_inner_one_with_loads() -> None:
    inner = ".L_x_1:\n LDG.E R1, [R2] ;\n FADD R1, R1, R2 ;\n @P0 BRA `(.L_x_1) ;\n"
    text = f" MOV R1, R2 ;\n.L_x_0:\n{inner}.L_x_2:\n FMUL R1, R1, R2 ;\n @P1 BRA `(.L_x_2) ;\n @P2 BRA `(.L_x_0) ;\n"
    assert main_loop(text) == ["LDG.E", "FADD", "BRA"]
    assert main_loop(" MOV R1, R2 ;\n EXIT ;\n") == ["MOV", "EXIT"]
