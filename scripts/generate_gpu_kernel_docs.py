"""Write docs/gpu_kernels.md: registers, shared memory and occupancy of every GPU kernel for every class of cards.

PYTHONPATH=. python scripts/generate_gpu_kernel_docs.py             everything
PYTHONPATH=. python scripts/generate_gpu_kernel_docs.py --counts    only the last table, instructions that are executed

Needs Triton and no GPU; takes a few minutes.
"""

import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hetero_ee_kernels import attention
from tests.gpu.counts.counts import ARCHITECTURE, CARDS, counted, workloads
from tests.gpu.ptx.launcher import Launcher
from tests.gpu_compilation import CARD_CLASSES, Compiled, compile_for
from tests.gpu_compilations import every_compilation

PAGE = Path(__file__).parent.parent / "docs" / "gpu_kernels.md"
HEADER = """# GPU kernels

Every Triton kernel, compiled ahead of time without a GPU: registers per thread, shared memory per program, and
occupancy, the share of a multiprocessor's warps that can be active at once. Generated with Triton {version} by
`scripts/generate_gpu_kernel_docs.py`; other versions give other numbers. The table notes spilled registers.
Memory-bound kernels load 16 bytes at a time (tests/gpu/test_ahead_of_time.py).

| class | cards | warps per multiprocessor | shared memory per program |
|---|---|---|---|
"""
READS = """
Keys and values that attention's programs load, counted: MiB per layer, fp16, {context_tokens} positions, by rows of one
sequence (m). Programs of a key head run one after another, so that all but the first find its keys in the L2 cache if
they fit. Without tensor cores (Turing, AMD, fp32 caches) a program has 4 queries instead of 16.

| model | rows of a sequence per program |"""
COUNTS = """
The next table has counts, not measurements, from executing the PTX for sm_{architecture} (tests/gpu/ptx): thread
instructions per byte of global memory touched, and 32-byte sectors requested per different sector touched. ptxas and
nvdisasm give the machine instructions (SASS) per PTX instruction in a kernel's longest loop with loads, or in all of a
kernel without one, the pipe that they occupy longest, and its clocks on one multiprocessor per KiB touched. The last
columns are that time as a share of the time to read the bytes from DRAM.

| launch | kernel | PTX per byte | SASS per byte | tightest pipe | clocks per KiB | sectors asked per touched |"""
READ_SHAPES = (("Llama-2-7B", 32, 1), ("Llama-3-8B", 8, 4))  # n_kv_heads, query heads of each
READ_ROWS = (1, 2, 4, 8, 16)
CONTEXT_TOKENS, HEAD_DIM = 4096, 128
ABSENT = "-"  # not for these cards: it holds instructions of the other maker


def main() -> None:
    if "--counts" in sys.argv:
        kept, _, _ = PAGE.read_text(encoding="utf-8").partition(COUNTS.partition(",")[0])
        PAGE.write_text(kept + counts(), encoding="utf-8")
        return
    rows = []
    for record in every_compilation():
        cards = [card for card in CARD_CLASSES if card.runs(record)]
        rows.append((record, [compile_for(record, card) for card in cards]))
    PAGE.write_text(page(version("triton"), rows) + counts(), encoding="utf-8")


def page(triton_version: str, rows: Iterable[tuple[Any, list[Compiled]]]) -> str:
    """Return the page. `rows` has each kernel's record with its compilations."""
    lines = [
        f"| {card.name} | {card.cards} | {card.max_warps} | {card.program_shared_bytes // 1024} KiB |"
        for card in CARD_CLASSES
    ]
    lines += ["", "| kernel | warps | " + " | ".join(card.name for card in CARD_CLASSES) + " |"]
    lines.append("|---|---|" + "---|" * len(CARD_CLASSES))
    for record, compiled in rows:
        of_card = {one.card.name: metrics(one) for one in compiled}
        cells = [of_card.get(card.name, ABSENT) for card in CARD_CLASSES]
        lines.append(f"| `{record.name}` | {record.n_warps} | " + " | ".join(cells) + " |")
    return HEADER.format(version=triton_version) + "\n".join(lines) + "\n" + reads()


def reads() -> str:
    """Return the table of what m rows of one sequence load, by rows per program."""
    lines = [READS.format(context_tokens=CONTEXT_TOKENS) + "".join(f" m = {m} |" for m in READ_ROWS)]
    lines.append("|---|---|" + "---|" * len(READ_ROWS))
    for model, n_kv_heads, group in READ_SHAPES:
        once_mib = 2 * CONTEXT_TOKENS * n_kv_heads * HEAD_DIM * 2 >> 20
        taken = attention._sizes(group, HEAD_DIM, has_products=True)["ROWS"]
        for n_rows in (n for n in READ_ROWS if n <= taken):
            cells = "".join(f" {-(-m // n_rows) * once_mib} |" for m in READ_ROWS)
            lines.append(f"| {model} | {n_rows}{', as used' * (n_rows == taken)} |{cells}")
    return "\n".join(lines) + "\n"


def counts() -> str:
    """Return the table of executed instructions."""
    lines = [COUNTS.format(architecture=ARCHITECTURE) + "".join(f" {card} |" for card in CARDS)]
    lines.append("|---|---|---|---|---|---|---|" + "---|" * len(CARDS))
    launcher = Launcher(ARCHITECTURE)
    for row in (row for name in workloads() for row in counted(name, launcher)):
        shares = "".join(f" {row.share(card):.0%} |".replace("%", " %") for card in CARDS)
        per_byte, sass = row.instructions_per_byte, row.sass
        counted_here = f"{per_byte:.2f} | {per_byte * sass.per_ptx:.2f} | {sass.pipe} | {row.clocks_per_kib:.1f}"
        counted_here += f" | {row.asked_per_touched:.2f}"
        lines.append(f"| {row.workload} | `{row.kernel}` | {counted_here} |{shares}")
    return "\n".join(lines) + "\n"


def metrics(compiled: Compiled) -> str:
    """Return registers, shared memory and occupancy as one cell."""
    shared = compiled.shared_bytes
    room = f"{shared // 1024} KiB" if shared >= 1024 else f"{shared} B"
    spilled = f" · {compiled.stack_bytes} B spilled" if compiled.stack_bytes else ""
    return f"{compiled.registers} · {room} · {compiled.occupancy:.0%}{spilled}".replace("%", " %")


if __name__ == "__main__":
    main()
