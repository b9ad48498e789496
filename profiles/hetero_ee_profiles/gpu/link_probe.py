"""Measures copies between CPU and GPU, launches, and transfers of hidden states."""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from statistics import median

import torch
from torch import Tensor

from hetero_ee_profiles.gpu.platform import GpuPlatform, Work
from hetero_ee_profiles.hardware import LinkTimes
from hetero_ee_profiles.measurement import Measurement, Origin, measured
from hetero_ee_profiles.probe_samples import Clock

SMALL_BYTES = 4096
SHORT_REPEATS = 10  # samples of a microsecond operation per sample of a millisecond operation
LAUNCHES = 100  # per sample, in a row
MOST_READS = 16  # of the CPU's memory per sample, however slow the link is
LEAST_S = 1e-9  # avoids an infinite rate when the clock does not advance
LEAST_SHARE = 0.05  # of the link's rate, the least that copies reach while the CPU reads


def probe_link(
    platform: GpuPlatform,
    hidden_size: int,
    n_bytes: int,
    read: Callable[[], int],
    repeats: int,
    origin: Origin,
    clock: Clock,
) -> LinkTimes:
    """Measure all times of the link.

    Args:
        n_bytes: size of one large copy. At most four such buffers are in the CPU's memory, two in the GPU's.
        read: reads memory on all CPU cores and returns the number of bytes.
    """
    near, other_near = platform.pinned(n_bytes), platform.pinned(n_bytes)
    far, other_far = (platform.allocate((n_bytes,), torch.uint8) for _ in range(2))
    pageable = torch.ones(n_bytes, dtype=torch.uint8)

    def rate(*copies: tuple[Tensor, Tensor]) -> Measurement:
        times = _copy_s(platform, copies, repeats, clock)
        return measured([len(copies) * n_bytes / max(seconds, LEAST_S) for seconds in times], "B/s", origin)

    def timed(seconds: Sequence[float]) -> Measurement:
        return measured(seconds, "s", origin)

    n_short, to_gpu = SHORT_REPEATS * repeats, rate((far, near))
    beside_cpu = probe_beside_cpu_bytes_per_s(platform, (far, near), to_gpu.value, read, repeats, clock)
    return LinkTimes(
        to_gpu_bytes_per_s=to_gpu,
        beside_cpu_bytes_per_s=measured(beside_cpu, "B/s", origin),
        to_cpu_bytes_per_s=rate((near, far)),
        pageable_to_gpu_bytes_per_s=rate((far, pageable)),
        pageable_to_cpu_bytes_per_s=rate((pageable, far)),
        both_ways_bytes_per_s=rate((far, near), (other_near, other_far)),
        latency=timed(_copy_s(platform, [(far[:SMALL_BYTES], near[:SMALL_BYTES])], n_short, clock)),
        launch=timed(probe_launch_s(platform, n_short, clock)),
        synchronize=timed(probe_synchronize_s(platform, n_short, clock)),
        transfer=timed(probe_transfer_s(platform, hidden_size, n_short, clock)),
    )


def probe_beside_cpu_bytes_per_s(
    platform: GpuPlatform,
    copied: tuple[Tensor, Tensor],
    alone: float,
    read: Callable[[], int],
    repeats: int,
    clock: Clock,
) -> list[float]:
    """Measure the rate of copies to the GPU while the CPU reads memory at full speed.

    It is the total rate of both at once, less the CPU's own rate without copies. Both are given work for the same time,
    so that the result is `alone` if neither slows the other down.

    Args:
        copied: target and source of a copy to the GPU. Only a part is copied if the CPU's reads take less time.
        alone: the copy's rate without reads.
        read: reads memory on all CPU cores and returns the number of bytes.
    """
    target, source = copied
    n_read_bytes = read()
    read_s = max(median(_timed(platform, read, repeats, clock, is_awaited=False)), LEAST_S)
    copy_s = source.nbytes / alone
    n_reads = min(MOST_READS, ceil(copy_s / read_s))
    n_copies = ceil(n_reads * read_s / copy_s)
    n_copy_bytes = max(1, min(source.nbytes, int(n_reads * read_s * alone / n_copies)))

    def both() -> None:
        for _ in range(n_copies):
            platform.copy(target[:n_copy_bytes], source[:n_copy_bytes])
        for _ in range(n_reads):
            read()

    n_bytes = n_copies * n_copy_bytes + n_reads * n_read_bytes
    left = [n_bytes / seconds - n_read_bytes / read_s for seconds in _timed(platform, both, repeats, clock)]
    return [min(alone, max(rate, LEAST_SHARE * alone)) for rate in left]


def probe_launch_s(platform: GpuPlatform, repeats: int, clock: Clock) -> list[float]:
    """Measure the CPU's seconds per kernel launch, averaged over LAUNCHES in a row."""
    x = platform.allocate((1,), torch.float32)

    def launches() -> None:
        for _ in range(LAUNCHES):
            platform.launch(x)

    return [seconds / LAUNCHES for seconds in _timed(platform, launches, repeats, clock, is_awaited=False)]


def probe_synchronize_s(platform: GpuPlatform, repeats: int, clock: Clock) -> list[float]:
    """Measure the seconds from a kernel launch until the CPU knows that the kernel is done."""
    x = platform.allocate((1,), torch.float32)
    return _timed(platform, lambda: platform.launch(x), repeats, clock)


def probe_transfer_s(platform: GpuPlatform, hidden_size: int, repeats: int, clock: Clock) -> list[float]:
    """Measure the seconds of one hidden state's transfer between CPU and GPU.

    It is half the time from the CPU through a GPU kernel back to the CPU, which waits for an event.
    """
    hidden = torch.ones(hidden_size)
    there, back = (platform.pinned(hidden.nbytes).view(torch.float32) for _ in range(2))
    far = platform.allocate((hidden_size,), torch.float32)

    def there_and_back() -> None:
        there.copy_(hidden)
        platform.copy(far, there)
        platform.launch(far)
        platform.copy(back, far)
        platform.wait()

    return [seconds / 2 for seconds in _timed(platform, there_and_back, repeats, clock, is_awaited=False)]


def _copy_s(platform: GpuPlatform, copies: Sequence[tuple[Tensor, Tensor]], repeats: int, clock: Clock) -> list[float]:
    """Return the seconds until all copies (target, source), started together, are done, for each repeat."""
    works = [partial(platform.copy, target, source) for target, source in copies]
    return _timed(platform, works[0] if len(works) == 1 else partial(platform.at_once, *works), repeats, clock)


def _timed(platform: GpuPlatform, work: Work, repeats: int, clock: Clock, *, is_awaited: bool = True) -> list[float]:
    """Return the seconds of repeated runs on an idle GPU, until the GPU is done if is_awaited. Warms up first."""
    found = []
    for _ in range(repeats + 1):
        platform.synchronize()
        start_s = clock()
        work()
        if is_awaited:
            platform.synchronize()
        found.append(clock() - start_s)
    platform.synchronize()
    return found[1:]
