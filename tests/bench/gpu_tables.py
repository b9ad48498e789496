"""The figures of bench_gpu.py as Markdown, and what was aimed at."""

from collections.abc import Callable, Iterator
from typing import Any

MIN_COPY_SHARE, MAX_KAPPA_8, MAX_MISS = 0.85, 1.6, 0.15  # goals


def goals(document: dict[str, Any]) -> list[dict[str, Any]]:
    """What was aimed at, and whether it was reached."""
    found = []
    gpu = document["machine"].get("products", [])
    for row in gpu:
        shape = f"{row['layout']} {row['n']} x {row['k']}"
        if row["m"] == 1:
            found.append((f"{shape}, of copy", row["share"], row["share"] >= MIN_COPY_SHARE))
        if row["m"] == 8:
            found.append((f"{shape}, kappa(8)", row["kappa"], row["kappa"] <= MAX_KAPPA_8))
    rows = [row for row in document["plans"] if "failed" not in row] if isinstance(document["plans"], list) else []
    for row in rows:
        for name in ("full", "prompt", "exact"):
            ratio = row[name]["ratio"]
            if ratio is not None:
                found.append((f"{row['gpu_layers']} layers, {name}: of predicted", ratio, abs(ratio - 1) <= MAX_MISS))
    return [{"goal": name, "value": value, "met": met} for name, value, met in found]


def kernels_table(part: dict[str, Any]) -> Iterator[str]:
    yield f"{'all right' if part['passed'] else 'WRONG'}: {' '.join(part['said'])}"
    yield from part["failures"]


def machine_table(part: dict[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{key} {value}" for key, value in part["card"].items())
    yield f"\ncopy {part['copy_gb_s']:.0f} GB/s; goals: {MIN_COPY_SHARE:.0%} of it at m = 1, kappa(8) {MAX_KAPPA_8}\n"
    yield from product_rows("GPU", part["products"])
    for times in part["cpu"]:
        yield f"\nCPU, {times['threads']} threads, reads {times['read_gb_s']:.1f} GB/s\n"
        yield from product_rows(f"CPU {times['threads']}", times["products"])
    yield "\n| link | |\n|---|---|"
    for name, value in part["link"].items():
        yield f"| {name} | {value / 1e9:.1f} GB/s |" if value > 1 else f"| {name} | {value * 1e6:.1f} us |"
    yield "\n| tokens | layer overhead us | pass overhead us |\n|---|---|---|"
    for m, layer_s, pass_s in part["overheads"]:
        yield f"| {m} | {layer_s * 1e6:.1f} | {pass_s * 1e6:.1f} |"
    yield "\n| tokens | context | attention of a layer, us |\n|---|---|---|"
    for m, context_tokens, seconds in part["attentions"]:
        yield f"| {m} | {context_tokens} | {seconds * 1e6:.1f} |"
    yield from part["warnings"]


def product_rows(where: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| device | layout | N x K | m | us | of bandwidth | kappa | TFLOP/s |\n|---|---|---|---|---|---|---|---|"
    for r in rows:
        figures = f"{r['us']:.1f} | {r['share']:.0%} | {r['kappa']:.2f} | {r['tflops']:.2f}"
        yield f"| {where} | {r['layout']} | {r['n']} x {r['k']} | {r['m']} | {figures} |"


def launches_table(part: dict[str, float]) -> Iterator[str]:
    yield "| launch | us |\n|---|---|"
    yield from (f"| {name} | {us:.2f} |" for name, us in part.items())


def plans_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"tokens/s, predicted and achieved; goal: within {MAX_MISS:.0%}. exact: synthetic acceptance 0.78\n"
    yield "| layers on the GPU | full | prompt | exact | tokens a pass | same text |\n|---|---|---|---|---|---|"
    for row in rows:
        if "failed" in row:
            yield f"| {row['layer_share']:.0%} | {row['failed']} |"
            continue
        cells = " | ".join(cell(row[name]) for name in ("full", "prompt", "exact"))
        same = "yes" if row["same_text"] else "NO"
        yield f"| {row['gpu_layers']} ({row['layer_share']:.0%}) | {cells} | {row['tokens_per_pass']:.2f} | {same} |"


def cell(figures: dict[str, Any]) -> str:
    if figures["predicted"] is None:
        return f"{figures['achieved']:.1f}"
    return f"{figures['predicted']:.1f} / {figures['achieved']:.1f} ({figures['ratio']:.2f})"


def libraries_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| library | N x K | m | us |\n|---|---|---|---|"
    for p in rows:
        yield f"| {p['library']} | {p['n']} x {p['k']} | {p['m']} | {p.get('failed') or format(p['us'], '.1f')} |"


TABLES: dict[str, Callable[[Any], Iterator[str]]] = {
    "kernels": kernels_table,
    "machine": machine_table,
    "launches": launches_table,
    "plans": plans_table,
    "libraries": libraries_table,
}


def markdown(document: dict[str, Any]) -> Iterator[str]:
    """The figures as tables, the goals beside them."""
    if document["is_dry_run"]:
        yield "**A dry run: no figure here means anything.**\n"
    for name, table in TABLES.items():
        yield f"\n## {name}\n"
        part = document.get(name)
        if isinstance(part, dict) and "failed" in part:
            yield part["failed"]
        elif part is not None:
            yield from table(part)
    yield "\n## goals\n\n| goal | value | |\n|---|---|---|"
    yield from (f"| {g['goal']} | {g['value']:.2f} | {'met' if g['met'] else 'missed'} |" for g in document["goals"])
