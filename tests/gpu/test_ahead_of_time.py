"""Every kernel compiled for every class of cards without having one: no spills, memory within bounds, vector loads.

One class of cards and two records a kernel here, the rest with `pytest -m slow`: matmuls take seconds each.
"""

import ast
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED
from hetero_ee_kernels.tile_group import mma
from hetero_ee_kernels.tile_matrix import PTX
from tests.gpu_compilation import CARD_CLASSES, CardClass, Compilation, Compiled, compile_for, reduction_layouts
from tests.gpu_compilations import every_compilation
from tests.gpu_support import IS_INTERPRETED

if IS_INTERPRETED:
    pytest.skip("Triton compiles nothing where it interprets", allow_module_level=True)

ROOT = Path(__file__).parents[2]
CARD_IN_CI = next(card for card in CARD_CLASSES if card.name == "sm_86")
RECORDS = list(every_compilation())
RECORDS_OF_CLASS = [record for record in RECORDS if CARD_IN_CI.runs(record)]
RECORDS_IN_CI = [
    record
    for place, record in enumerate(RECORDS_OF_CLASS)
    if place in (0, len(RECORDS_OF_CLASS) - 1)
    or record.function is not RECORDS_OF_CLASS[place - 1].function
    or record.function is not RECORDS_OF_CLASS[place + 1].function
]


@triton.jit
def transposed_kernel(words_ptr: tl.tensor, out_ptr: tl.tensor, TRANSPOSED: tl.constexpr) -> None:  # noqa: N803
    at = tl.arange(0, 32)[None, None, :]
    if TRANSPOSED:
        at = 4 * tl.arange(0, 8)[None, None, :] + tl.arange(0, 4)[None, :, None]
    word = tl.load(words_ptr + at)
    tl.store(out_ptr + at, mma((word, word, word, word), (word, word), 3)[0])


@pytest.fixture(autouse=True, scope="session")
def _own_kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def check(record: Any, card: CardClass) -> Compiled:
    compiled = compile_for(record, card)
    assert compiled.stack_bytes == 0, f"registers are spilled: {compiled}"
    assert compiled.shared_bytes <= card.program_shared_bytes and compiled.occupancy > 0, compiled
    assert compiled.n_vector_loads or not record.is_memory_bound, f"no 16-byte load: {compiled}"
    assert not compiled.n_fusible, f"the assembler may fuse what tl.fma doesn't ask for: {compiled}"
    assert compiled.has_lanes_in_order, f"another layout than mma's fragments: {compiled}"
    return compiled


@pytest.mark.parametrize("record", RECORDS_IN_CI, ids=lambda record: record.name)
@pytest.mark.sample(2)
def test_compiles_well(record: Any) -> None:
    check(record, CARD_IN_CI)


@pytest.mark.slow
@pytest.mark.parametrize("card", CARD_CLASSES, ids=lambda card: card.name)
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_compiles_well_for_every_class(record: Any, card: CardClass) -> None:
    if card.runs(record):
        check(record, card)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["fp16_group_1{}", "fp16_group_4{}", "fp32_group_1{}_lanes", "int8_group_1{}"])
def test_a_prompts_attention_sums_in_the_order_of_one_tokens(kind: str) -> None:
    """Two specializations of one kernel: the compiler must spread their sums over threads alike."""
    few, many = (
        next(record for record in RECORDS if record.name == f"attention_{kind.format(whole)}")
        for whole in ("", "_whole")
    )
    found = reduction_layouts(few, CARD_IN_CI)
    assert any(shape.count("x") == 1 + ("lanes" in kind) for shape, _ in found)
    assert found == reduction_layouts(many, CARD_IN_CI)


def test_names_are_unique_and_every_kernel_file_has_records() -> None:
    names = [record.name for record in RECORDS]
    assert len(names) == len(set(names))
    folder = ROOT / "kernels" / "hetero_ee_kernels"
    files = {file.stem for file in folder.glob("*.py") if "\n@triton.jit" in file.read_text()}
    covered = {record.function.__module__.rsplit(".", 1)[1] for record in RECORDS}
    assert files - covered <= {"attention_part", "noise", "tile_group"}  # steps that other kernels are made of


def test_too_few_registers_are_seen() -> None:
    """The check for spills, on a kernel that is made to spill."""
    import triton

    record = next(record for record in RECORDS if record.name == "attention_fp16_group_4")
    compile_kernel = triton.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            triton, "compile", lambda s, target, options: compile_kernel(s, target, options | {"maxnreg": 32})
        )
        assert compile_for(record, CARD_IN_CI).stack_bytes > 0


def test_what_the_compiler_may_fuse_is_seen() -> None:
    """The check for fusion, on a kernel that is compiled with it."""
    record = next(record for record in RECORDS if record.name == "rms_norm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(UNFUSED, "enable_fp_fusion", True)
        assert compile_for(record, CARD_IN_CI).n_fusible > 0


def test_every_launch_says_that_nothing_is_fused_unasked() -> None:
    """kernel[grid](...) without it would take Triton's default, which changes in 3.10."""
    n_launches = 0
    for file in (ROOT / "kernels" / "hetero_ee_kernels").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                n_launches += 1
                given = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg is None]
                assert "UNFUSED" in given, f"{file.name}:{node.lineno} launches a kernel without **UNFUSED"
    assert n_launches >= 10


def test_other_lanes_are_seen() -> None:
    """The check for layouts, on fragments whose rows and columns are axes of their own."""
    arguments = {"words_ptr": "*i32", "out_ptr": "*i32"}
    record = Compilation("mma", transposed_kernel, arguments, {"TRANSPOSED": True}, 1, isa=PTX)
    assert not compile_for(record, CARD_IN_CI).has_lanes_in_order
    assert compile_for(replace(record, constants={"TRANSPOSED": False}), CARD_IN_CI).has_lanes_in_order


def test_a_pointer_that_may_be_unaligned_has_no_vector_load() -> None:
    """The check for vector loads, on a kernel whose rows begin anywhere."""
    record = next(record for record in RECORDS if record.name == "activate_relu")
    odd = replace(record, constants=dict(record.constants) | {"F": 11007})
    assert compile_for(record, CARD_IN_CI).n_vector_loads and not compile_for(odd, CARD_IN_CI).n_vector_loads


def test_the_page_covers_every_kernel_and_class() -> None:
    """Figures differ from one Triton to the next, so the page says which one made them, and is not compared."""
    page = (ROOT / "docs" / "gpu_kernels.md").read_text(encoding="utf-8")
    assert "Triton 3." in page
    for record in RECORDS:
        assert f"\n| `{record.name}` |" in page, f"{record.name} is missing: python scripts/generate_gpu_kernel_docs.py"
    for card in CARD_CLASSES:
        assert f"| {card.name} |" in page


def test_the_generator_writes_a_row_a_kernel() -> None:
    spec = importlib.util.spec_from_file_location("generator", ROOT / "scripts" / "generate_gpu_kernel_docs.py")
    assert spec and spec.loader
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    compiled = Compiled("example", CARD_IN_CI, 4, 128, 0, 8192, 7)
    row = generator.kernel_row(RECORDS[0], [compiled])
    assert row == f"| `{RECORDS[0].name}` | {RECORDS[0].n_warps} | - | - | 128 · 8 KiB · 33 % | - | - | - | - |\n"
    page = generator.page("3.7.1", [row], ["| norm | `a_kernel` | 1 |\n", "| norm | `b_kernel` | 2 |\n"])
    assert "Triton 3.7.1" in page
    assert generator.rows_of(page)[f"`{RECORDS[0].name}`"] == row
    assert generator.rows_of(page)["norm"] == "| norm | `a_kernel` | 1 |\n| norm | `b_kernel` | 2 |\n"
    assert "\n| Llama-2-7B | 16, as used | 64 | 64 | 64 | 64 | 64 |\n" in page
    assert "\n| Llama-3-8B | 4, as used | 16 | 16 | 16 | 32 | 64 |\n" in page
