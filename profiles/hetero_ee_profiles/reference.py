"""Profiles of machines that are not at hand, derived from data sheets by one rule. Nothing is measured.

Rule: a product needs the time of a call plus the longer of reading its weights and computing. Memory, link and disk
reach a share of what the data sheet states. A CPU reaches the operations per cycle and 64 bytes of vector width that
this repository's CPU kernels reach, times its cores, clock and vector width; a GPU reaches a share of its fp32 rate
that grows with the number of rows. If it needs longer to compute attention than to read its cache, that time counts.
Each constant below names its source; `python scripts/compare_published.py` compares the results with published speeds.
CPU and copies share the RAM: while the CPU reads weights, copies get the rest of the rated bandwidth.
"""

from dataclasses import dataclass

from hetero_ee_profiles.data_sheets import DataSheet, data_sheets
from hetero_ee_profiles.errors import UsageError
from hetero_ee_profiles.hardware import (
    DERIVED,
    PROFILE_VERSION,
    AttentionTime,
    DeviceTimes,
    HardwareProfile,
    LinkTimes,
    Machine,
    MatmulTime,
    OverheadTime,
    interpolated,
    mean_positions,
)
from hetero_ee_profiles.measurement import Measurement, Origin, derived
from hetero_ee_profiles.units import GIB

COMMAND = "derived from data sheets by hetero_ee_profiles/reference.py"
DATE = "2026-11-23"  # of the rule and its numbers
VERSIONS = "data sheets; CPU kernels as in docs/benchmarks.md of 2026-11-21"
# Copy kernels, and fits of seconds per token over bytes through llama.cpp's CUDA scoreboard (discussion 15013).
VRAM_SHARE = 0.90
# Desktop and laptop CPUs read at 0.62 to 0.73 of the rated rate in published measurements. Decoding by llama.cpp on a
# CPU alone reads its weights at 0.84 of DDR4-3600 (Ryzen 5900X) and 0.79 of DDR5-3600 (7950X; Mixtral in Q8_0, issue
# 4716), and at 0.77 of DDR5-5600 (Ryzen HX 370; Qwen2.5-32B in Q4_K_M, issue 19480): no less of DDR4 than of DDR5.
RAM_SHARE = 0.68
LINK_SHARE = 0.8  # pinned copies: 22.9 of 31.5 GB/s on an RTX 4090, published; pageable memory half of that
DISK_SHARE = 0.8  # assumed
# A GPU's operations as a share of its fp32 rate, for up to that many rows. One row is limited by reading. From 2 to 64
# rows: what llama.cpp's int8 tensor-core kernels reach for an 8B Q4_0 model on an RTX 4090 in microbatches of 16, 32
# and 64 tokens, 1937, 3428 and 5420 tokens/s (pull request 7676); its dp4a kernels reach 0.25 to 0.28 of the rate
# (15802). Above: 0.6 of twice the rate until it is measured here; llama.cpp's kernels reach 0.7 to 1.2 of that.
FP32_SHARES = {1: 0.8, 16: 0.35, 32: 0.62, 64: 0.98, 512: 1.2}
# Clocks of a multiprocessor, of 128 fp32 lanes, that the GPU's attention needs per KiB of an fp16 cache with four heads
# per key head, by rows of a decoding sequence, with and without tensor cores (counted, docs/gpu_kernels.md). Other
# kernels need less time than reading, on every data sheet. tests/pure/test_published_speeds.py checks both.
ATTENTION_CLOCKS = {True: {1: 81.0, 4: 82.3, 16: 269.7}, False: {1: 56.6, 4: 214.1}}
FP32_LANES = 128
MAX_DECODE_ROWS = 16
# 596 GOPS at 16 rows on one Zen 5 thread with 64-byte vectors at 4.1 GHz (tests/bench/bench_cpu_ops.py, 2026-11-21).
OPERATIONS_PER_CYCLE_AND_64_BYTES = 145.0
# AVX2 without byte dot products, linear codes, in the same benchmark: 262 GOPS, with 32-byte vectors.
AVX2_OPERATIONS_PER_CYCLE_AND_64_BYTES = 128.0
# Share of two fp32 vector multiply-adds per cycle that a CPU's attention reaches for a prompt, in fp32: 128 tokens at
# the end of 2,048 positions reach 0.4 with AVX2, on one thread and on two alike (AMD EPYC Milan at 3.1 GHz), so
# CPU_SHARE does not apply; 0.52 with AVX-512 (Sapphire Rapids; tests/bench/bench_cpu_ops.py, 2026-11-23).
ATTENTION_SHARE = 0.4
CPU_SHARE = 0.7  # of that on all cores: gives 51 per cycle of a Ryzen 7950X core, where 50 is the best published
CPU_LAYER_OVERHEAD_S = 17e-6  # measured on the same machine
CPU_CALL_S = 4e-6  # assumed
# A layer has five calls and this overhead: 31 us; published: 28 to 35 with CUDA graphs on Linux, twice that on Windows.
GPU_CALL_S = 3e-6
GPU_LAYER_OVERHEAD_S = 15e-6
GPU_PASS_OVERHEAD_S = 60e-6  # assumed: sampling, its synchronization, the embedding
TRANSFER_S = 60e-6  # assumed, for hidden states that the other device waits for; 30 to 100 published
COPY_LATENCY_S = 10e-6  # assumed
CPU_LAUNCH_S = 9e-6  # CPU time of a launch outside a graph, published for ordinary code
SYNCHRONIZE_S = 57e-6  # of a stream, published for ordinary code
GPU_FREE_SHARE = 0.93  # assumed: what a desktop and the driver leave free
RAM_FREE_SHARE = 0.8  # assumed
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (128, 1024, 4096)
MANY_ROWS = 32768  # of a matrix, so that its time is mostly not the call's
LAYOUT_BYTES = {"int4": 4.5 / 8, "int8": 8.5 / 8}  # per weight, including scales


def reference_names() -> list[str]:
    """Return the names of shipped profiles, which `--hardware` accepts in addition to files."""
    return sorted(sheet.name for sheet in data_sheets())


def reference_profile(name: str) -> HardwareProfile:
    """Return the shipped profile called `name`. Raises: UsageError: if there isn't one."""
    found = next((sheet for sheet in data_sheets() if sheet.name == name), None)
    if found is None:
        raise UsageError(
            f"{name!r:.60} is not a shipped profile; `hetero-ee profile --list` lists them, or name a file."
        )
    return derived_profile(found, DATE)


def derived_profile(sheet: DataSheet, date: str) -> HardwareProfile:
    """Derive a profile from a data sheet. `date` is the ISO date of the derivation."""
    origin = Origin(COMMAND, date, VERSIONS)
    return HardwareProfile(
        version=PROFILE_VERSION,
        name=sheet.name,
        kind=DERIVED,
        machine=Machine(
            cpu_model=sheet.cpu_model,
            n_cores=sheet.n_cores,
            instruction_set="avx-vnni" if sheet.has_dot else "avx2",
            ram_bytes=sheet.ram_gib * GIB,
            gpu_model=sheet.gpu_model,
            vram_bytes=sheet.vram_gib * GIB,
            driver=None,
            versions=VERSIONS,
        ),
        cpu=(_cpu_times(sheet, origin),),
        gpu=_gpu_times(sheet, origin),
        link=_link_times(sheet, origin),
        disk_read_bytes_per_s=_rate(sheet.disk_gb_s * DISK_SHARE, origin),
        warnings=(),
    )


def _cpu_times(sheet: DataSheet, origin: Origin) -> DeviceTimes:
    per_cycle = OPERATIONS_PER_CYCLE_AND_64_BYTES if sheet.has_dot else AVX2_OPERATIONS_PER_CYCLE_AND_64_BYTES
    cycles_per_s = sheet.n_cores * sheet.ghz * 1e9
    operations_per_s = CPU_SHARE * per_cycle * sheet.vector_bytes / 64 * cycles_per_s
    attention_per_s = ATTENTION_SHARE * 4 * sheet.vector_bytes / 4 * cycles_per_s
    speed = _Speed(
        share=RAM_SHARE,
        operations_per_s=dict.fromkeys(ROWS, operations_per_s),
        attention_per_s=dict.fromkeys((1, 4, 16, 512), attention_per_s),
        call_s=CPU_CALL_S,
        layer_s=CPU_LAYER_OVERHEAD_S,
        pass_s=2 * CPU_LAYER_OVERHEAD_S,
    )
    free_bytes = int(sheet.ram_gib * GIB * RAM_FREE_SHARE)
    return _times(origin, sheet.n_cores, free_bytes, _rate(sheet.ram_gb_s, origin), speed)


def _gpu_times(sheet: DataSheet, origin: Origin) -> DeviceTimes:
    fp32 = sheet.fp32_tflops * 1e12
    operations_per_s = {m: fp32 * FP32_SHARES[min(most for most in FP32_SHARES if most >= m)] for m in ROWS}
    clocks_by_rows, clocks_per_s = ATTENTION_CLOCKS["NVIDIA" in sheet.gpu_model], fp32 / (2 * FP32_LANES)
    speed = _Speed(
        share=VRAM_SHARE,
        operations_per_s=operations_per_s,
        attention_per_s={m: operations_per_s[m] for m in (1, 4, 16, 64, 128, 512)},
        call_s=GPU_CALL_S,
        layer_s=GPU_LAYER_OVERHEAD_S,
        pass_s=GPU_PASS_OVERHEAD_S,
        attention_s_per_byte={m: clocks / 1024 / clocks_per_s for m, clocks in clocks_by_rows.items()},
    )
    return _times(origin, 0, int(sheet.vram_gib * GIB * GPU_FREE_SHARE), _rate(sheet.vram_gb_s, origin), speed)


@dataclass(frozen=True, slots=True)
class _Speed:
    """Speed of a device: operations per second by number of rows, and overheads."""

    share: float  # of the rated bytes per second, which products and attention reach
    operations_per_s: dict[int, float]
    attention_per_s: dict[int, float]
    call_s: float
    layer_s: float
    pass_s: float
    attention_s_per_byte: dict[int, float] | None = None  # of the cache, by number of rows, if that limits


def _times(origin: Origin, threads: int, free_bytes: int, rated: Measurement, speed: _Speed) -> DeviceTimes:
    """Derive a device's times. One shape suffices, since time is proportional to weights apart from a call's.

    Overheads grow by 5 % per token.

    Args:
        rated: memory bandwidth of the data sheet, bytes per second.
    """

    def seconds(value: float) -> Measurement:
        return derived(value, "s", origin)

    side, n_heads, head_dim, rate = 4096, 32, 128, rated.value * speed.share

    def product_s(weight_bytes: float, m: int) -> float:
        return speed.call_s + MANY_ROWS * side * max(weight_bytes / rate, 2 * m / speed.operations_per_s[m])

    def attention_s(m: int, context: int) -> float:
        read_s, kv_bytes = 2 * side * 4 * context / rate, side * context  # fp32; fp16 with a quarter of the key heads
        products_s = 4 * m * mean_positions(m, context) * side / speed.attention_per_s[m]
        limits = speed.attention_s_per_byte if m <= MAX_DECODE_ROWS else None
        more_s = kv_bytes * (interpolated([*limits.items()], m) - 1 / rate) if limits else 0.0  # than to read
        return speed.call_s + max(read_s, products_s, read_s + more_s)

    matmuls = tuple(
        MatmulTime(layout, MANY_ROWS, side, m, GIB, seconds(product_s(weight_bytes, m)))
        for layout, weight_bytes in LAYOUT_BYTES.items()
        for m in ROWS
    )
    attentions = tuple(
        AttentionTime(n_heads, n_heads, head_dim, m, context, "fp32", seconds(attention_s(m, context)))
        for m in speed.attention_per_s
        for context in CONTEXTS
    )
    overheads = tuple(
        OverheadTime(side, 11008, m, seconds(speed.layer_s * (1 + m / 20)), seconds(speed.pass_s * (1 + m / 20)))
        for m in ROWS
    )
    return DeviceTimes(threads, free_bytes, rated, seconds(speed.call_s), matmuls, attentions, overheads)


def _link_times(sheet: DataSheet, origin: Origin) -> LinkTimes:
    gb_s = sheet.link_gb_s * LINK_SHARE
    rate, pageable = _rate(gb_s, origin), _rate(gb_s / 2, origin)
    return LinkTimes(
        to_gpu_bytes_per_s=rate,
        beside_cpu_bytes_per_s=_rate(min(gb_s, sheet.ram_gb_s * (1 - RAM_SHARE)), origin),
        to_cpu_bytes_per_s=rate,
        pageable_to_gpu_bytes_per_s=pageable,
        pageable_to_cpu_bytes_per_s=pageable,
        both_ways_bytes_per_s=_rate(gb_s * 1.5, origin),
        latency=derived(COPY_LATENCY_S, "s", origin),
        launch=derived(CPU_LAUNCH_S, "s", origin),
        synchronize=derived(SYNCHRONIZE_S, "s", origin),
        transfer=derived(TRANSFER_S, "s", origin),
    )


def _rate(gb_per_s: float, origin: Origin) -> Measurement:
    return derived(gb_per_s * 1e9, "B/s", origin)
