"""The GPU and link probes on a stand-in whose times are known: the right figures come out."""

from typing import Any

import pytest
import torch

from hetero_ee_profiles.gpu.link_probe import (
    SHORT_REPEATS,
    probe_beside_cpu_bytes_per_s,
    probe_launch_s,
    probe_link,
    probe_synchronize_s,
    probe_transfer_s,
)
from hetero_ee_profiles.gpu.platform import cuda_platform
from hetero_ee_profiles.gpu.probe import (
    PIECE_BYTES,
    ProductKernel,
    Sampling,
    probe_free_bytes,
    probe_gpu_attention,
    probe_gpu_copy_bytes_per_s,
    probe_gpu_products,
)
from hetero_ee_profiles.measurement import Origin
from hetero_ee_profiles.probe_samples import ProductSamples, ProductShape
from tests.stand_in_gpu import COPY_S, GPU, LAUNCH_S, PAGEABLE, PINNED, RATES, SYNCHRONIZE_S, WAIT_S, StandInGpu

MIB = 2**20
SAMPLING = Sampling(3, 1.0)


@pytest.mark.parametrize("driver_bytes, usable_bytes", [(2**30, 700 * MIB), (2**29, 2**29), (100 * MIB, 2**30), (0, 0)])
def test_free_memory_is_what_can_be_had_and_is_given_back(driver_bytes: int, usable_bytes: int) -> None:
    gpu = StandInGpu(driver_bytes, usable_bytes)
    found, limit = probe_free_bytes(gpu), min(driver_bytes, usable_bytes)
    assert limit - PIECE_BYTES < found <= limit
    assert gpu.held_bytes == 0


def test_a_copy_counts_what_is_read_and_what_is_written() -> None:
    gpu = StandInGpu()
    found = probe_gpu_copy_bytes_per_s(gpu, 5, 0.0, gpu.clock)
    n_bytes = gpu.largest_bytes
    assert n_bytes == 2**23  # a fourth of what is free
    assert found == pytest.approx([2 * n_bytes / (COPY_S + n_bytes / RATES[GPU, GPU])] * 5)


def test_a_gpu_at_rest_is_warmed_up_first() -> None:
    cold, warm = StandInGpu(), StandInGpu()
    probe_gpu_copy_bytes_per_s(cold, 2, 0.0, cold.clock)
    probe_gpu_copy_bytes_per_s(warm, 2, 0.02, warm.clock)
    assert cold.calls["copy"] == 3 and warm.calls["copy"] > 100 and warm.now_s >= 0.02


def test_a_copy_does_not_fit_the_l2_cache() -> None:
    gpu = StandInGpu(driver_bytes=2**40, usable_bytes=2**32, l2_bytes=2**27)
    probe_gpu_copy_bytes_per_s(gpu, 1, 0.0, gpu.clock)
    assert gpu.largest_bytes == 4 * 2**27


def test_launches_and_waiting() -> None:
    gpu = StandInGpu()
    assert probe_launch_s(gpu, 4, gpu.clock) == pytest.approx([LAUNCH_S] * 4, rel=1e-2)
    assert probe_synchronize_s(gpu, 4, gpu.clock) == pytest.approx([LAUNCH_S + SYNCHRONIZE_S] * 4, rel=1e-2)


class Multiplications:
    """Products that take a nanosecond for each weight and row, and write down what they were given."""

    def __init__(self, gpu: StandInGpu, is_capturable: bool = True) -> None:
        self.gpu, self.is_capturable = gpu, is_capturable
        self.rows: dict[str, list[int]] = {"int4": [], "int8": []}
        self.addresses: dict[ProductShape, set[int]] = {}

    @property
    def kernels(self) -> dict[str, ProductKernel]:
        return {layout: self._kernel(layout) for layout in ("int4", "int8")}

    def _kernel(self, layout: str) -> ProductKernel:
        def multiply(x: torch.Tensor, matrix: ProductShape, out: torch.Tensor) -> None:
            m = len(x)
            self.rows[layout].append(m)
            assert (x.shape, out.shape) == ((m, matrix.n_columns), (m, matrix.n_rows)) and x.dtype == torch.float32
            self.gpu.spend(m * matrix.n_rows * matrix.n_columns * 1e-9)

        def prepared(shape: ProductShape, tiles: torch.Tensor, scales: torch.Tensor) -> ProductShape:
            assert tuple(tiles.shape) == (*shape.grid, 256 if layout == "int4" else 512)
            assert tiles.dtype == (torch.uint8 if layout == "int4" else torch.int8)
            assert tuple(scales.shape) == (*shape.grid, 16) and scales.dtype == torch.float16
            assert tiles.is_contiguous() and tiles.data_ptr() % 16 == 0 and scales.data_ptr() % 16 == 0
            self.addresses.setdefault(shape, set()).add(tiles.data_ptr())
            return shape

        return ProductKernel(multiply, prepared, self.is_capturable)


SHAPES = (ProductShape("int4", 64, 96, 4), ProductShape("int8", 40, 64, 1))
MODEL_BYTES = sum(shape.n_bytes * shape.n_layers for shape in SHAPES)


def products(work: Multiplications, rows: tuple[int, ...] = (1,), cycle_bytes: int = 2**20) -> list[ProductSamples]:
    return probe_gpu_products(work.gpu, SHAPES, rows, work.kernels, SAMPLING, cycle_bytes)


def test_products_are_timed_each_by_itself() -> None:
    work = Multiplications(StandInGpu())
    found = products(work, (1, 16, 130))
    assert [(p.shape, p.m) for p in found] == [(shape, m) for shape in SHAPES for m in (1, 16, 130)]
    for p in found:
        assert p.seconds == pytest.approx([p.m * p.shape.n_rows * p.shape.n_columns * 1e-9] * 3)
    assert work.gpu.n_recorded == 6 and work.gpu.held_bytes == 0


def test_a_prompts_rows_are_one_product() -> None:
    work = Multiplications(StandInGpu(), is_capturable=False)
    probe_gpu_products(work.gpu, SHAPES[:1], (35,), work.kernels, Sampling(1, 1.0), MODEL_BYTES)
    n_matrices = len(work.addresses[SHAPES[0]])
    assert n_matrices > 1
    assert work.rows["int4"] == [35] * (1 + 2 * n_matrices)  # the first compiles, then one run before the one timed


def test_what_can_not_be_recorded_is_launched_one_by_one() -> None:
    work = Multiplications(StandInGpu(), is_capturable=False)
    assert len(products(work)) == 2 and work.gpu.n_recorded == 0


def test_a_small_model_takes_turns_over_as_many_bytes_as_it_has() -> None:
    work = Multiplications(StandInGpu())
    for p in products(work):
        assert MODEL_BYTES <= p.cycle_bytes < MODEL_BYTES + p.shape.n_bytes
        assert len(work.addresses[p.shape]) * p.shape.n_bytes == p.cycle_bytes


@pytest.mark.parametrize(
    "max_bytes, l2_bytes, free_bytes, expected",
    [
        (SHAPES[0].n_bytes * 2, 1, 2**28, 2),  # as asked
        (1, SHAPES[0].n_bytes // 2, 2**28, 2),  # four caches of half a matrix
        (2**30, 1, 12 * SHAPES[0].n_bytes, 3),  # a fourth of what is free
        (2**30, 1, 1, 1),  # nothing is free: one is tried all the same
    ],
)
def test_a_turn_is_limited(max_bytes: int, l2_bytes: int, free_bytes: int, expected: int) -> None:
    work = Multiplications(StandInGpu(free_bytes, 2**40, l2_bytes))
    assert products(work, cycle_bytes=max_bytes)[0].cycle_bytes == expected * SHAPES[0].n_bytes


def test_slow_products_are_sampled_less_often() -> None:
    work = Multiplications(StandInGpu())
    turn_s = -(-MODEL_BYTES // SHAPES[0].n_bytes) * 64 * 96 * 1e-9
    for max_s, expected in ((0.5 * turn_s, 1), (1.5 * turn_s, 2), (9 * turn_s, 7)):
        found = probe_gpu_products(work.gpu, SHAPES[:1], (1,), work.kernels, Sampling(7, max_s), 2**20)
        assert len(found[0].seconds) == expected


def test_attention_sees_each_layer_and_the_last_rows_of_the_context() -> None:
    gpu, seen = StandInGpu(), []

    def attend(
        queries: Any, pages: Any, slots: Any, positions: Any, layer: int, window: Any, out: Any, *, workspace: Any
    ) -> None:
        m = len(queries)
        assert queries.shape == out.shape == (m, 6 * 8) and slots.tolist() == [0] * m and window is None
        assert m <= 4 and workspace.numel() >= m * 6 * pages.n_parts * 10 and pages.codes.dtype == torch.float16
        assert pages.table.tolist() == [list(range(4))]
        seen.append((m, int(positions[0]), int(positions[-1]), layer))
        gpu.spend(m * (int(positions[-1]) + 1) * 1e-9)

    found = probe_gpu_attention(gpu, (6, 2, 8), 3, [(1, 16), (4, 200)], attend, True, SAMPLING)
    assert [(a.m, a.context_tokens) for a in found] == [(1, 16), (4, 200)]
    assert found[0].seconds == pytest.approx([16e-9] * 3, rel=1e-6)
    assert found[1].seconds == pytest.approx([4 * 200e-9] * 3)
    asked = ((1, 15, 15), (4, 196, 199))
    assert set(seen) == {(*rows, layer) for rows in asked for layer in range(3)}


def test_link() -> None:
    gpu, n_bytes = StandInGpu(), 2**20
    found = probe_link(gpu, 64, n_bytes, lambda: 0, 3, Origin("a test", "2026-11-21", "versions"), gpu.clock)

    def rate(source: str, target: str) -> float:
        return n_bytes / (n_bytes / RATES[source, target] + COPY_S + SYNCHRONIZE_S + 1e-6)

    for metric, source, target in (
        (found.to_gpu_bytes_per_s, PINNED, GPU),
        (found.to_cpu_bytes_per_s, GPU, PINNED),
        (found.pageable_to_gpu_bytes_per_s, PAGEABLE, GPU),
        (found.pageable_to_cpu_bytes_per_s, GPU, PAGEABLE),
    ):
        assert metric.count == 3
        assert (metric.p20, metric.p80) == pytest.approx((rate(source, target),) * 2, rel=1e-3)
    slower_s = n_bytes / RATES[GPU, PINNED] + COPY_S + SYNCHRONIZE_S + 2e-6
    assert found.both_ways_bytes_per_s.value == pytest.approx(2 * n_bytes / slower_s, rel=1e-3)
    small_s = 4096 / RATES[PINNED, GPU] + COPY_S + SYNCHRONIZE_S + 1e-6
    assert found.latency.value == pytest.approx(small_s, rel=1e-3)
    for metric in (found.latency, found.launch, found.synchronize, found.transfer):
        assert metric.count == 3 * SHORT_REPEATS and metric.p20 == pytest.approx(metric.p80, rel=1e-2)
    assert gpu.held_bytes == 0


@pytest.mark.parametrize("ram_rate, expected", [(1e12, 20e9), (48e9, 48e9 - 40e9), (40e9, 0.05 * 20e9)])
def test_copies_beside_the_cpu_get_what_it_leaves_of_the_ram(ram_rate: float, expected: float) -> None:
    """The CPU alone reads 40 GB/s, the link alone moves 20; both at once no more than the RAM gives."""
    gpu, n_bytes, n_read_bytes, pending = StandInGpu(), 2**22, 2**28, [0]
    target, source = gpu.allocate((n_bytes,), torch.uint8), gpu.pinned(n_bytes)

    def copy(target: Any, source: Any) -> None:
        pending[0] += len(source)

    def read() -> int:
        begun = gpu.now_s
        gpu.now_s = max(begun + n_read_bytes / 40e9, begun + (pending[0] + n_read_bytes) / ram_rate)
        pending[0] = 0
        return n_read_bytes

    gpu.copy = copy  # type: ignore[method-assign]
    found = probe_beside_cpu_bytes_per_s(gpu, (target, source), 20e9, read, 3, gpu.clock)
    assert found == pytest.approx([expected] * 3, rel=0.05)


@pytest.mark.parametrize("link_rate, cpu_rate", [(25e9, 60e9), (3e9, 60e9), (60e9, 25e9), (25e9, 26e9), (12e9, 0.5e9)])
@pytest.mark.parametrize("n_read_bytes", [2**22, 100 * 2**20, 2**30])
def test_copies_beside_a_cpu_that_leaves_them_alone(link_rate: float, cpu_rate: float, n_read_bytes: int) -> None:
    """However long a copy takes against a read, nothing of the link's rate is lost."""
    gpu, link_free_s = StandInGpu(2**28), [0.0]
    target, source = gpu.allocate((2**26,), torch.uint8), gpu.pinned(2**26)

    def copy(target: Any, source: Any) -> None:
        assert len(target) == len(source)
        link_free_s[0] = max(gpu.now_s, link_free_s[0]) + len(source) / link_rate

    def read() -> int:
        gpu.now_s += n_read_bytes / cpu_rate
        return n_read_bytes

    def synchronize() -> None:
        gpu.now_s = max(gpu.now_s, link_free_s[0])

    gpu.copy, gpu.synchronize = copy, synchronize  # type: ignore[method-assign]
    found = probe_beside_cpu_bytes_per_s(gpu, (target, source), link_rate, read, 3, gpu.clock)
    assert found == pytest.approx([link_rate] * 3, rel=0.05)


def test_a_transfer_is_half_the_way_there_and_back() -> None:
    gpu = StandInGpu()
    n_bytes = 4 * 1000
    way_s = n_bytes / RATES[PINNED, GPU] + n_bytes / RATES[GPU, PINNED] + 2 * (COPY_S + 1e-6) + LAUNCH_S + WAIT_S
    assert probe_transfer_s(gpu, 1000, 5, gpu.clock) == pytest.approx([way_s / 2] * 5, rel=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU here")
def test_without_a_gpu() -> None:
    assert cuda_platform(None) is None
    with pytest.raises(RuntimeError, match=r"torch .* for .* cannot use it"):
        cuda_platform("NVIDIA GeForce RTX 3060")
