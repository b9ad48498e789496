"""The GPU's matmuls against the card's copy bandwidth and other libraries: right first, then fast. Needs a GPU.

    python tests/bench/bench_gpu_ops.py [--json] [--quick] [--small]

Every product is first compared with float64 on fresh random inputs, its output poisoned with NaN. Times are medians of
CUDA graphs of many launches over copies of the weights that the L2 cache cannot hold. copy: bytes read and written per
second by a device-to-device copy, the ceiling. share: weights and scales read per second over it. Goals: at m = 1 85 %
of the copy bandwidth; m = 8 at most 1.6 times as long as m = 1.
--small compares only, on small matrices, and runs in Triton's interpreter where there is no GPU.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from gpu_tables import MAX_KAPPA_8, MIN_COPY_SHARE

SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (5120, 13824), (32000, 4096), (28672, 8192))
SMALL_SHAPES = ((17, 290),)
DECODE_ROWS = (1, 2, 4, 8, 16)
CODEBOOKS: dict[str, tuple[int, ...] | None] = {
    "linear": tuple(range(-8, 8)),
    "codebook": (-127, -92, -70, -54, -40, -27, -16, -5, 5, 16, 28, 40, 54, 70, 90, 113),
    "int8": None,
}
BOUND = 1e-9  # squared error over squared size
COPY_BYTES = 2**29
MIN_CYCLE_BYTES, CACHE_MULTIPLE = 2**28, 4  # what weights cycle through: several times the L2 cache


@dataclass(frozen=True, slots=True)
class Row:
    """One operation on one shape at m rows. error: what was measured against float64. share: of the copy bandwidth."""

    operation: str
    tiles: str
    n: int
    k: int
    m: int
    us: float
    gbps: float
    share: float
    error: float


@dataclass(slots=True)
class Report:
    """What --json prints."""

    machine: dict[str, Any]
    copy_gbps: float
    rows: list[Row] = field(default_factory=list)
    peers: list[dict[str, Any]] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--quick", action="store_true", help="one shape, few repeats")
    parser.add_argument("--small", action="store_true", help="compare results on small matrices, time nothing")
    arguments = parser.parse_args()
    if arguments.small:
        return compare_small()
    if not torch.cuda.is_available():
        print("There is no GPU that torch can use: nothing was measured.", file=sys.stderr)
        return 1
    report = measure(SHAPES[:1] if arguments.quick else SHAPES, 5 if arguments.quick else 20)
    print(json.dumps(asdict(report)) if arguments.json else table(report))
    return 0


def compare_small() -> int:
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for shape in SMALL_SHAPES:
        for tiles in CODEBOOKS:
            weight = random_weight(tiles, shape, device)
            for m in (1, 2, 9, 20):
                print(f"matmul {tiles:9} {shape} m={m}: {checked_error(weight, shape[1], m):.1e}")
    return 0


def random_weight(tiles: str, shape: tuple[int, int], device: str) -> Any:
    from hetero_ee_kernels.tile_matrix import TileMatrix

    codebook = CODEBOOKS[tiles]
    size = (-(-shape[0] // 16), -(-shape[1] // 32), 512 if codebook is None else 256)
    bits = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    scales = (torch.randn((*size[:2], 16), device=device) * 0.01).half()
    return TileMatrix(bits.view(torch.int8) if codebook is None else bits, scales, 0, codebook, shape[0])


def checked_error(weight: Any, n_columns: int, m: int) -> float:
    """Squared error over squared size on fresh inputs. Raises RuntimeError where it is above the bound, or NaN."""
    from hetero_ee_kernels import reference
    from hetero_ee_kernels.matmul import matmul

    device = weight.tiles.device
    x = torch.randn((m, n_columns), device=device).half()
    out = torch.full((m, weight.n_rows), torch.nan, device=device)
    matmul(x, weight, out)
    expected = reference.matmul(x, weight).double()
    error = float((out.double() - expected).square().sum() / expected.square().sum())
    if not error <= BOUND:
        raise RuntimeError(f"matmul at {weight.n_rows} x {n_columns}, m = {m}, is wrong: {error} > {BOUND}.")
    return error


def measure(shapes: tuple[tuple[int, int], ...], repeats: int) -> Report:
    report = Report(machine(), copy_gbps(repeats))
    for shape in shapes:
        fp16_us = {m: torch_fp16_us(shape, m, repeats) for m in DECODE_ROWS}
        report.peers += [peer("torch fp16", shape, m, us) for m, us in fp16_us.items()]
        report.peers += list(other_libraries(shape, repeats))
        for tiles in CODEBOOKS:
            rows = list(measured_rows(tiles, shape, report.copy_gbps, repeats))
            report.rows += rows
            report.goals += list(goals(rows))
    return report


def measured_rows(tiles: str, shape: tuple[int, int], copy: float, repeats: int) -> Iterator[Row]:
    from hetero_ee_kernels.matmul import matmul

    weights = [random_weight(tiles, shape, "cuda")]
    weights += [random_weight(tiles, shape, "cuda") for _ in range(n_copies(weights[0].n_bytes) - 1)]
    for m in DECODE_ROWS:
        error = checked_error(weights[0], shape[1], m)
        x = torch.randn((m, shape[1]), device="cuda").half()
        out = torch.empty((m, shape[0]), device="cuda")
        us = graph_us(lambda weight, x=x, out=out: matmul(x, weight, out), weights, repeats)
        gbps = weights[0].n_bytes / us / 1e3
        yield Row("matmul", tiles, *shape, m, us, gbps, gbps / copy, error)


def n_copies(n_bytes: int) -> int:
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, -(-max(MIN_CYCLE_BYTES, CACHE_MULTIPLE * cache) // n_bytes))


def graph_us(action: Callable[[Any], Any], operands: list[Any], repeats: int) -> float:
    """Median time of one call, in a CUDA graph of a call on each operand: the launches' own time is not the GPU's."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for operand in operands[:2]:
            action(operand)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for operand in operands:
            action(operand)
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(operands))
    return statistics.median(times)


def copy_gbps(repeats: int) -> float:
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / graph_us(lambda _: target.copy_(source), [None] * 2, repeats) / 1e3


def torch_fp16_us(shape: tuple[int, int], m: int, repeats: int) -> float:
    n_bytes = 2 * shape[0] * shape[1]
    weights = [torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(n_copies(n_bytes))]
    x = torch.randn((m, shape[1]), device="cuda", dtype=torch.float16)
    return graph_us(lambda weight: x @ weight.T, weights, repeats)


def other_libraries(shape: tuple[int, int], repeats: int) -> Iterator[dict[str, Any]]:
    """4-bit products of libraries that are installed; where one fails, why."""
    for name, prepare in (("bitsandbytes nf4", bitsandbytes_nf4), ("torch int4pack, bf16", torch_int4pack)):
        for m in DECODE_ROWS:
            try:
                action, n_bytes = prepare(shape, m)
                us = graph_us(lambda call: call(), [action() for _ in range(n_copies(n_bytes))], repeats)
            except Exception as error:  # whatever a library raises is its row in the table
                yield {"library": name, "n": shape[0], "k": shape[1], "m": m, "failed": str(error).splitlines()[0]}
            else:
                yield peer(name, shape, m, us)


def bitsandbytes_nf4(shape: tuple[int, int], m: int) -> tuple[Callable[[], Callable[[], Any]], int]:
    """What makes one copy's call, and the bytes of a copy."""
    import bitsandbytes as bnb

    x = torch.randn((m, shape[1]), device="cuda", dtype=torch.float16)

    def prepared() -> Callable[[], Any]:
        dense = torch.randn(shape, device="cuda", dtype=torch.float16)
        packed, state = bnb.functional.quantize_4bit(dense, blocksize=64, quant_type="nf4")
        return lambda: bnb.matmul_4bit(x, packed.t(), quant_state=state)

    return prepared, shape[0] * shape[1] * 9 // 16


def torch_int4pack(shape: tuple[int, int], m: int) -> tuple[Callable[[], Callable[[], Any]], int]:
    group = 64
    x = torch.randn((m, shape[1]), device="cuda", dtype=torch.bfloat16)

    def prepared() -> Callable[[], Any]:
        pairs = torch.randint(0, 256, (shape[0], shape[1] // 2), device="cuda", dtype=torch.uint8)
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
        scales = torch.randn((shape[1] // group, shape[0], 2), device="cuda", dtype=torch.bfloat16)
        return lambda: torch.ops.aten._weight_int4pack_mm(x, packed, group, scales)

    return prepared, shape[0] * shape[1] * 9 // 16


def peer(name: str, shape: tuple[int, int], m: int, us: float) -> dict[str, Any]:
    return {"library": name, "n": shape[0], "k": shape[1], "m": m, "us": us}


def goals(rows: list[Row]) -> Iterator[dict[str, Any]]:
    """Of one shape and kind of tile."""
    first, eighth = (next(row for row in rows if row.m == m) for m in (1, 8))
    yield goal(first, "share of copy bandwidth at m = 1", first.share, first.share >= MIN_COPY_SHARE)
    kappa = eighth.us / first.us
    yield goal(first, "time at m = 8 over m = 1", kappa, kappa <= MAX_KAPPA_8)


def goal(row: Row, name: str, value: float, met: bool) -> dict[str, Any]:
    shape = {"operation": row.operation, "tiles": row.tiles, "n": row.n, "k": row.k}
    return {**shape, "goal": name, "value": value, "met": met}


def machine() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return {
        "card": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "l2_cache_bytes": properties.L2_cache_size,
        "driver": driver,
        "cuda": torch.version.cuda,
        "cpu": platform.processor() or platform.machine(),
        "system": platform.platform(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: version_of(name) for name in ("torch", "triton", "bitsandbytes")},
    }


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def table(report: Report) -> str:
    lines = [f"{key}: {value}" for key, value in report.machine.items()]
    lines += [
        f"copy: {report.copy_gbps:.0f} GB/s",
        "",
        "| operation | tiles | N x K | m | us | GB/s | of copy | error |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for r in report.rows:
        metrics = f"{r.us:.1f} | {r.gbps:.0f} | {r.share:.0%} | {r.error:.0e}"
        lines.append(f"| {r.operation} | {r.tiles} | {r.n} x {r.k} | {r.m} | {metrics} |")
    lines += ["", "| library | N x K | m | us |", "|---|---|---|---|"]
    for p in report.peers:
        lines.append(
            f"| {p['library']} | {p['n']} x {p['k']} | {p['m']} | {p.get('failed') or format(p['us'], '.1f')} |"
        )
    lines += ["", "| goal | operation | tiles | N x K | value | |", "|---|---|---|---|---|---|"]
    for g in report.goals:
        met = "met" if g["met"] else "missed"
        lines.append(
            f"| {g['goal']} | {g['operation']} | {g['tiles']} | {g['n']} x {g['k']} | {g['value']:.2f} | {met} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
