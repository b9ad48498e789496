"""Writes docs/gpu_kernels.md: what the compiler makes of every GPU kernel, for every class of cards.

PYTHONPATH=. python scripts/generate_gpu_kernel_docs.py

Needs Triton and no GPU; takes a few minutes.
"""

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hetero_ee_kernels import attention
from tests.gpu_compilation import CARD_CLASSES, Compiled, compile_for
from tests.gpu_compilations import every_compilation

PAGE = Path(__file__).parent.parent / "docs" / "gpu_kernels.md"
HEADER = """# GPU kernels

What the compiler makes of every Triton kernel, compiled ahead of time without a GPU: registers of a thread, shared
memory of a program, and occupancy, the share of a multiprocessor's warps that can be there at once. Generated with
Triton {version} by `scripts/generate_gpu_kernel_docs.py`; another Triton gives other numbers. Registers are not spilled
where the table doesn't say so; what memory bounds reads 16 bytes at a time (tests/gpu/test_ahead_of_time.py).

| class | cards | warps of a multiprocessor | shared memory of a program |
|---|---|---|---|
"""
READS = """
Keys and values that attention's programs load, by counting: MiB a layer, fp16, {context_tokens} positions. Programs of
a key head follow each other, so that all but the first find them in the L2 cache where it holds them. With 8 query
heads or rows instead of 4 a program takes 226 to 255 registers and spills for prompts (hetero_ee_kernels/attention.py).

| model | rows of a sequence a program |"""
READ_SHAPES = (("Llama-2-7B", 32, 1), ("Llama-3-8B", 8, 4))  # n_kv_heads, query heads of each
READ_ROWS = (1, 2, 4, 8, 16)
CONTEXT_TOKENS, HEAD_DIM = 4096, 128
ABSENT = "-"  # not for these cards: it holds instructions of the other maker


def main() -> None:
    rows = []
    for record in every_compilation():
        cards = [card for card in CARD_CLASSES if card.runs(record)]
        rows.append((record, [compile_for(record, card) for card in cards]))
    PAGE.write_text(page(version("triton"), rows), encoding="utf-8")


def page(triton_version: str, rows: Iterable[tuple[Any, list[Compiled]]]) -> str:
    """rows: each kernel's record with what it was compiled to."""
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
    """What m rows of one sequence load where a program takes as many of them as it does, and where it takes fewer."""
    lines = [READS.format(context_tokens=CONTEXT_TOKENS) + "".join(f" m = {m} |" for m in READ_ROWS)]
    lines.append("|---|---|" + "---|" * len(READ_ROWS))
    for model, n_kv_heads, group in READ_SHAPES:
        once_mib = 2 * CONTEXT_TOKENS * n_kv_heads * HEAD_DIM * 2 >> 20
        taken = attention._sizes(group, HEAD_DIM)["ROWS"]
        for n_rows in (n for n in READ_ROWS if n <= taken):
            cells = "".join(f" {-(-m // n_rows) * once_mib} |" for m in READ_ROWS)
            lines.append(f"| {model} | {n_rows}{', as it is' * (n_rows == taken)} |{cells}")
    return "\n".join(lines) + "\n"


def metrics(compiled: Compiled) -> str:
    """Registers · shared memory · occupancy."""
    shared = compiled.shared_bytes
    room = f"{shared // 1024} KiB" if shared >= 1024 else f"{shared} B"
    spilled = f" · {compiled.stack_bytes} B spilled" if compiled.stack_bytes else ""
    return f"{compiled.registers} · {room} · {compiled.occupancy:.0%}{spilled}".replace("%", " %")


if __name__ == "__main__":
    main()
