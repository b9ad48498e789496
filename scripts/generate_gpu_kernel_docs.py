"""Write docs/gpu_kernels.md: registers, shared memory and occupancy of every GPU kernel for every class of cards.

Needs Triton and no GPU. The first run compiles on every core for some minutes. Later ones find in Triton's cache what
has not changed.
"""

import argparse
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

from hetero_ee_kernels import attention
from tests.gpu.counts.counts import ARCHITECTURE, CARDS, counted, workloads
from tests.gpu.ptx.launcher import Launcher
from tests.gpu_compilation import CARD_CLASSES, Compilation, Compiled, compile_for
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="renew only rows whose first cell contains TEXT")
    only, old_page = parser.parse_args().only, PAGE.read_text(encoding="utf-8")
    if only and f"Triton {version('triton')} " not in old_page:
        parser.error("another version of Triton made the other rows; renew all of them")
    kernels, launches = [f"`{record.name}`" for record in every_compilation()], workloads()
    old = rows_of(old_page)
    titles = [title for title in (*kernels, *launches) if only in title or title not in old]
    with ProcessPoolExecutor() as pool:
        rows = old | dict(zip(titles, pool.map(rows_for, titles), strict=True))
    text = page(version("triton"), [rows[title] for title in kernels], [rows[title] for title in launches])
    PAGE.write_text(text, encoding="utf-8")


def rows_of(text: str) -> dict[str, str]:
    """Return the rows of a page's tables by their first cell. A launch may have several rows, one per kernel."""
    rows: dict[str, str] = {}
    for row, title in re.findall(r"^(\| (.*?) \| .*\n)", text, re.MULTILINE):
        rows[title] = rows.get(title, "") + row
    return rows


def rows_for(title: str) -> str:
    """Compile a kernel for every class of cards, or count the instructions of a launch."""
    if title in workloads():
        return count_rows(title)
    record = next(record for record in every_compilation() if title == f"`{record.name}`")
    return kernel_row(record, [compile_for(record, card) for card in CARD_CLASSES if card.runs(record)])


def kernel_row(record: Compilation, compiled: Iterable[Compiled]) -> str:
    cells = {one.card.name: metrics(one) for one in compiled}
    listed = " | ".join(cells.get(card.name, ABSENT) for card in CARD_CLASSES)
    return f"| `{record.name}` | {record.n_warps} | {listed} |\n"


def count_rows(workload: str) -> str:
    lines = []
    for row in counted(workload, Launcher(ARCHITECTURE)):
        shares = "".join(f" {row.share(card):.0%} |".replace("%", " %") for card in CARDS)
        per_byte, sass = row.instructions_per_byte, row.sass
        counted_here = f"{per_byte:.2f} | {per_byte * sass.per_ptx:.2f} | {sass.pipe} | {row.clocks_per_kib:.1f}"
        counted_here += f" | {row.asked_per_touched:.2f}"
        lines.append(f"| {row.workload} | `{row.kernel}` | {counted_here} |{shares}\n")
    return "".join(lines)


def page(triton_version: str, kernel_rows: list[str], launch_rows: list[str]) -> str:
    """Return the page."""
    lines = [HEADER.format(version=triton_version)]
    for card in CARD_CLASSES:
        lines.append(f"| {card.name} | {card.cards} | {card.max_warps} | {card.program_shared_bytes // 1024} KiB |\n")
    lines.append("\n| kernel | warps | " + " | ".join(card.name for card in CARD_CLASSES) + " |\n")
    lines += ["|---|---|" + "---|" * len(CARD_CLASSES) + "\n", *kernel_rows, reads()]
    lines.append(COUNTS.format(architecture=ARCHITECTURE) + "".join(f" {card} |" for card in CARDS) + "\n")
    lines += ["|---|---|---|---|---|---|---|" + "---|" * len(CARDS) + "\n", *launch_rows]
    return "".join(lines)


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


def metrics(compiled: Compiled) -> str:
    """Return registers, shared memory and occupancy as one cell."""
    shared = compiled.shared_bytes
    room = f"{shared // 1024} KiB" if shared >= 1024 else f"{shared} B"
    spilled = f" · {compiled.stack_bytes} B spilled" if compiled.stack_bytes else ""
    return f"{compiled.registers} · {room} · {compiled.occupancy:.0%}{spilled}".replace("%", " %")


if __name__ == "__main__":
    main()
