"""`hetero-ee profile`: measures this machine with a model's shapes."""

import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_ee.config import Progress
from hetero_ee_cli.options.engine import ModelArgument, ModelOptions, RandomWeights
from hetero_ee_cli.options.flags import Json, with_options
from hetero_ee_cli.terminal.output import print_document, printable, say, table
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.models.spec import ModelSpec
    from hetero_ee_profiles.hardware import DeviceTimes, HardwareProfile, LinkTimes


@with_options(
    without={
        "profile": "it always measures a profile",
        "quantizer": "every int4 quantizer has the same shapes",
        "activations": "their times are those of more tokens",
        "context_tokens": "several context lengths are measured",
    }
)
def profile(
    engine: ModelOptions,
    model: ModelArgument = None,
    random_weights: RandomWeights = None,
    quick: Annotated[bool, typer.Option(help="Rough measurements in 5 seconds, all cores only.")] = False,
    refresh: Annotated[bool, typer.Option(help="Measure again even if a profile was kept.")] = False,
    lists: Annotated[bool, typer.Option("--list", help="Only list the shipped profiles, for --hardware.")] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine at a model's shapes: memory, kernels, attention, overheads, disk. Kept for later plans.

    Takes up to 3 minutes, with --quick about 5 seconds. Nothing else should be running: it would be measured too, and
    a profile disturbed by that is measured again at the next run.
    """
    if lists:
        _list_shipped(as_json=as_json)
        return
    with ending_at_once():
        from hetero_ee.hub import resolve  # noqa: F401 - imports that must not be interrupted
    from hetero_ee_profiles.records import to_json

    stages: set[str] = set()

    def noting(stage: str, n_done: int, n_all: int) -> None:
        stages.update([stage] if n_all else [])
        progress(stage, n_done, n_all)

    with stage_progress() as progress:
        spec, name, folder = engine.model_spec(model, random_weights, progress)
        n_threads = engine.arguments()["threads"]
        threads = (n_threads,) if n_threads else ()
        found = profile_for(spec, folder, noting, quick=quick, refresh=refresh, threads=threads)
    print(to_json(found) if as_json else _shown(found, name), end="" if as_json else "\n")
    say(_closing_line(spec, found, is_new=bool(stages)))


def _list_shipped(*, as_json: bool) -> None:
    """Print the shipped profiles, which are derived from data sheets instead of measured."""
    from hetero_ee_profiles.data_sheets import data_sheets

    sheets = sorted(data_sheets(), key=lambda sheet: sheet.name)
    if as_json:
        print_document({"kind": "derived", "machines": [asdict(sheet) for sheet in sheets]}, with_version=True)
        return
    rows: list[tuple[str, ...]] = [("profile", "CPU", "RAM GiB", "GB/s", "VRAM GiB", "GB/s", "TFLOPS", "link GB/s")]
    for each in sheets:
        gpu = each.vram_gib, each.vram_gb_s, each.fp32_tflops, each.link_gb_s
        rows.append((each.name, each.cpu_model, *(f"{value:g}" for value in (each.ram_gib, each.ram_gb_s, *gpu))))
    print(table(rows, numbers_from=2))
    print("DERIVED from data sheets; nothing was measured.")


def profile_for(
    spec: "ModelSpec",
    folder: Path | None,
    progress: Progress,
    *,
    quick: bool = True,
    refresh: bool = False,
    threads: tuple[int, ...] = (),
) -> "HardwareProfile":
    """Return this machine's profile for the model, stored or measured now. `folder` is None for random weights."""
    import torch

    from hetero_ee.profiling.automatic import profile_here
    from hetero_ee.profiling.machine_profile import Wanted

    torch.set_num_threads(1)  # more would compete with the kernels' threads
    command = " ".join(["hetero-ee", *sys.argv[1:2]])
    return profile_here(spec, folder, Wanted(quick=quick, refresh=refresh, threads=threads, command=command), progress)


def _closing_line(spec: "ModelSpec", found: "HardwareProfile", *, is_new: bool) -> str:
    """Return a line with the origin of the profile, measured or found, and its path."""
    from hetero_ee.config import data_folder
    from hetero_ee.profiling.kept import kept_file

    origin = found.disk_read_bytes_per_s.origin
    when = "measured now" if is_new else f"found, measured on {origin.date} by {origin.command}"
    file = kept_file(data_folder(), found, spec)
    where = printable(f"kept in {file}") if file else "not kept"
    return f"[ {when} | {where} | --refresh measures again ]"


def _shown(found: "HardwareProfile", name: str) -> str:
    machine = found.machine
    lines = [
        f"{machine.cpu_model}, {machine.n_cores} cores, {machine.instruction_set}, "
        f"{machine.ram_bytes / 2**30:.1f} GiB of RAM; {machine.gpu_model or 'no GPU'}",
        f"measured at the shapes of {name}, {found.disk_read_bytes_per_s.origin.date}, {machine.versions}",
        f"disk {found.disk_read_bytes_per_s.value / 1e9:.2f} GB/s"
        f"{'' if found.disk_read_bytes_per_s.count else ' (assumed: no file to read)'}",
    ]
    for times in found.cpu:
        title = f"{times.threads} thread{'s' if times.threads > 1 else ''}: memory read"
        lines += ["", *_times_shown(title, times)]
    if found.gpu is not None and found.link is not None:
        title = f"GPU: {found.gpu.free_bytes / 2**30:.1f} GiB free, memory copied"
        lines += ["", *_times_shown(title, found.gpu), "", *_link_shown(found.link)]
    return "\n".join([*lines, *found.warnings])


def _times_shown(title: str, times: "DeviceTimes") -> list[str]:
    """Return a table in microseconds of products, overheads and attention, with a column for each number of tokens.

    `title` names the device and an operation on its memory, whose rate is appended.
    """
    read, counts = times.read_bytes_per_s, sorted({row.m for row in times.matmuls})
    lines = [
        f"{title} {read.value / 1e9:.1f} GB/s ({read.p20 / 1e9:.1f} to {read.p80 / 1e9:.1f})",
        _line("microseconds at m =", counts, digits=0),
    ]
    products: dict[str, dict[int, float]] = {}
    for row in times.matmuls:
        products.setdefault(f"{row.layout} {row.n_rows} x {row.n_columns}", {})[row.m] = row.time.value * 1e6
    lines += [_line(shape, (found[m] for m in counts)) for shape, found in products.items()]
    lines += [
        _line(f"rows {row.n_rows} x {row.n_columns}, m = {row.m}, {row.active_share:.0%}", [row.time.value * 1e6])
        for row in times.rows
    ]
    for label, kind in (("rest of a layer", "layer"), ("rest of a pass", "whole_pass")):
        found = {row.m: getattr(row, kind).value * 1e6 for row in times.overheads}
        lines.append(_line(label, (found.get(m, float("nan")) for m in counts)))
    lines.append(_line("the smallest product", [times.call.value * 1e6]))
    return lines + [
        _line(f"attention, {row.m} of {row.context_tokens} tokens", [row.time.value * 1e6]) for row in times.attentions
    ]


def _link_shown(link: "LinkTimes") -> list[str]:
    """Return lines with the rates of copies and the times of small steps between the devices."""
    rates = (
        ("copy to the GPU", link.to_gpu_bytes_per_s),
        ("the same with a busy CPU", link.beside_cpu_bytes_per_s),
        ("copy to the CPU", link.to_cpu_bytes_per_s),
        ("both at once, together", link.both_ways_bytes_per_s),
        ("pageable memory to the GPU", link.pageable_to_gpu_bytes_per_s),
        ("pageable memory to the CPU", link.pageable_to_cpu_bytes_per_s),
    )
    times = (
        ("small copy", link.latency),
        ("launch", link.launch),
        ("launch and wait", link.synchronize),
        ("hidden state transfer", link.transfer),
    )
    return [
        "link: GB/s, then microseconds, each with p20 and p80",
        *(_line(name, (f.value / 1e9, f.p20 / 1e9, f.p80 / 1e9), digits=2) for name, f in rates),
        *(_line(name, (f.value * 1e6, f.p20 * 1e6, f.p80 * 1e6)) for name, f in times),
    ]


def _line(label: str, values: Iterable[float], digits: int = 1) -> str:
    return f"{label:28}" + "".join(f"{value:10.{digits}f}" for value in values)
