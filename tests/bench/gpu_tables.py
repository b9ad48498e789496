"""The figures of bench_gpu.py: shares and goals, and all of them as Markdown."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hetero_ee_profiles.hardware import DeviceTimes

MIN_COPY_SHARE, MAX_KAPPA_8, MAX_MISS = 0.85, 1.6, 0.15  # goals


def products(times: DeviceTimes, bytes_per_s: float) -> list[dict[str, Any]]:
    """Each shape at each m: seconds, weights read as a share of the bandwidth, kappa, and operations a second."""
    layout_bytes = {"int4": 4.5 / 8, "int8": 8.5 / 8}
    one_s = {(t.layout, t.n_rows, t.n_columns): t.time.value for t in times.matmuls if t.m == 1}
    rows = []
    for t in times.matmuls:
        size, seconds = t.n_rows * t.n_columns, t.time.value
        share = size * layout_bytes[t.layout] / seconds / bytes_per_s
        kappa = seconds / one_s[t.layout, t.n_rows, t.n_columns]
        rows.append(
            {"layout": t.layout, "n": t.n_rows, "k": t.n_columns, "m": t.m, "us": seconds * 1e6}
            | {"share": share, "kappa": kappa, "tflops": 2 * size * t.m / seconds / 1e12}
        )
    return rows


def goals(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """What was aimed at, and whether it was reached. A plan that was not run to its end has no goal."""
    found = []
    for row in figures.get("machine", {}).get("products", []):
        shape = f"{row['layout']} {row['n']} x {row['k']}"
        if row["m"] == 1:
            found.append((f"{shape}, of copy", row["share"], row["share"] >= MIN_COPY_SHARE))
        if row["m"] == 8:
            found.append((f"{shape}, kappa(8)", row["kappa"], row["kappa"] <= MAX_KAPPA_8))
    for row in plan_rows(figures):
        for name, mode in (("full", "full"), ("prompt", "full"), ("exact", "exact")):
            ratio = row.get(name, {}).get("ratio")
            if ratio is not None and mode not in row["replanned"]:
                found.append((f"{row['gpu_layers']} layers, {name}: of predicted", ratio, abs(ratio - 1) <= MAX_MISS))
    return [{"goal": name, "value": value, "met": met} for name, value, met in found]


def failures(figures: dict[str, Any]) -> list[str]:
    """What failed, was left out, or is wrong."""
    found = [
        f"{name}: {part['failed']}" for name, part in figures.items() if isinstance(part, dict) and "failed" in part
    ]
    if not figures.get("kernels", {}).get("passed", True):
        found.append(f"kernels: {' '.join(figures['kernels']['said'])}")
    if "cpu" in figures.get("machine", {}) and "products" not in figures["machine"]:
        found.append(f"machine: no GPU was measured: {'; '.join(figures['machine']['warnings'])}")
    for row in plan_rows(figures):
        found += [f"{row['gpu_layers']} layers, {mode}: {why}" for mode, why in row["failed"].items()]
        if not row.get("same_text", True):
            found.append(f"{row['gpu_layers']} layers: the text of exact mode is not that of full mode")
    return found


def plan_rows(figures: dict[str, Any]) -> list[dict[str, Any]]:
    rows = figures.get("plans")
    return rows if isinstance(rows, list) else []


def agreeing_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def kernels_table(part: dict[str, Any]) -> Iterator[str]:
    yield f"{'all right' if part['passed'] else 'WRONG'}: {' '.join(part['said'])}"
    yield from part["failures"]


def machine_table(part: dict[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{key} {value}" for key, value in part["card"].items())
    yield from part["warnings"]
    if "products" in part:
        yield from gpu_tables(part)
    for times in part["cpu"]:
        yield f"\nCPU, {times['threads']} threads, reads {times['read_gb_s']:.1f} GB/s\n"
        yield from product_rows(f"CPU {times['threads']}", times["products"])


def gpu_tables(part: dict[str, Any]) -> Iterator[str]:
    yield f"\ncopy {part['copy_gb_s']:.0f} GB/s; goals: {MIN_COPY_SHARE:.0%} of it at m = 1, kappa(8) {MAX_KAPPA_8}\n"
    yield from product_rows("GPU", part["products"])
    yield "\n| link | |\n|---|---|"
    for name, value in part["link"].items():
        yield f"| {name} | {value / 1e9:.1f} GB/s |" if value > 1 else f"| {name} | {value * 1e6:.1f} us |"
    yield "\n| tokens | layer overhead us | pass overhead us |\n|---|---|---|"
    for m, layer_s, pass_s in part["overheads"]:
        yield f"| {m} | {layer_s * 1e6:.1f} | {pass_s * 1e6:.1f} |"
    yield "\n| tokens | context | attention of a layer, us |\n|---|---|---|"
    for m, context_tokens, seconds in part["attentions"]:
        yield f"| {m} | {context_tokens} | {seconds * 1e6:.1f} |"


def product_rows(where: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| device | layout | N x K | m | us | of bandwidth | kappa | TFLOP/s |\n|---|---|---|---|---|---|---|---|"
    for r in rows:
        figures = f"{r['us']:.1f} | {r['share']:.0%} | {r['kappa']:.2f} | {r['tflops']:.2f}"
        yield f"| {where} | {r['layout']} | {r['n']} x {r['k']} | {r['m']} | {figures} |"


def launches_table(part: dict[str, float]) -> Iterator[str]:
    yield "| launch | us |\n|---|---|"
    yield from (f"| {name} | {us:.2f} |" for name, us in part.items())


def plans_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"tokens/s, predicted and achieved; goal: within {MAX_MISS:.0%}. exact: synthetic acceptance 0.78."
    yield "as first row: tokens of the text before one that differs; CPU and GPU may add up in different orders.\n"
    yield "| layers on the GPU | full | prompt | exact | tokens a pass | exact as full | as first row | |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        cells = [f"{row['gpu_layers']} ({row['layer_share']:.0%})"]
        cells += [cell(row[name]) if name in row else "" for name in ("full", "prompt", "exact")]
        if "text" in row:
            cells += [f"{row['tokens_per_pass']:.2f}", "yes" if row["same_text"] else "NO"]
            cells += [f"{row['as_first_row']} of {len(row['text'])}"]
        else:
            cells += [""] * 3
        remarks = [f"{mode}: {why}" for mode, why in row["failed"].items()]
        remarks += [f"{mode}: another plan ran, for want of memory" for mode in row["replanned"]]
        yield f"| {' | '.join([*cells, '; '.join(remarks)])} |"


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
    yield "\n## failures\n"
    yield from (f"- {failure}" for failure in document["failures"]) if document["failures"] else ["none"]
