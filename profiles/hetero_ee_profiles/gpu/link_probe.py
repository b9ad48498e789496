"""Times copies between CPU and GPU, and a hidden state's way there and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hetero_ee_profiles.gpu.platform import GpuPlatform
from hetero_ee_profiles.probe_samples import Clock

SMALL_BYTES = 4096
SHORT_REPEATS = 10  # samples of what takes microseconds, for each of what takes milliseconds
LEAST_S = 1e-9  # so that a clock that stands still gives no infinite rate


@dataclass(frozen=True, slots=True)
class LinkSamples:
    """Bytes per second of pinned memory, of pageable memory, and of pinned memory both ways at once (their sum);
    seconds of a small copy that the CPU waits for, and of one transfer."""

    to_gpu: tuple[float, ...]
    to_cpu: tuple[float, ...]
    pageable_to_gpu: tuple[float, ...]
    pageable_to_cpu: tuple[float, ...]
    both_ways: tuple[float, ...]
    latency_s: tuple[float, ...]
    transfer_s: tuple[float, ...]


def probe_link(platform: GpuPlatform, hidden_size: int, n_bytes: int, repeats: int, clock: Clock) -> LinkSamples:
    """n_bytes: of one large copy; four such buffers are on the CPU's side at most, two on the GPU's."""
    near, other_near = platform.pinned(n_bytes), platform.pinned(n_bytes)
    far, other_far = (platform.allocate((n_bytes,), torch.uint8) for _ in range(2))
    pageable = torch.ones(n_bytes, dtype=torch.uint8)

    def rates(*copies: tuple[Tensor, Tensor]) -> tuple[float, ...]:
        times = _copy_s(platform, copies, repeats, clock)
        return tuple(len(copies) * n_bytes / max(seconds, LEAST_S) for seconds in times)

    n_short = SHORT_REPEATS * repeats
    return LinkSamples(
        to_gpu=rates((far, near)),
        to_cpu=rates((near, far)),
        pageable_to_gpu=rates((far, pageable)),
        pageable_to_cpu=rates((pageable, far)),
        both_ways=rates((far, near), (other_near, other_far)),
        latency_s=tuple(_copy_s(platform, [(far[:SMALL_BYTES], near[:SMALL_BYTES])], n_short, clock)),
        transfer_s=tuple(probe_transfer_s(platform, hidden_size, 1, n_short, clock)),
    )


def probe_transfer_s(platform: GpuPlatform, hidden_size: int, m: int, repeats: int, clock: Clock) -> list[float]:
    """Half the time from where the CPU has m rows of hidden states, over a kernel of the GPU that uses them, until the
    CPU, which waits for an event, can use the result."""
    rows = torch.ones(m, hidden_size)
    there, back = (platform.pinned(rows.nbytes).view(torch.float32).view(rows.shape) for _ in range(2))
    far = platform.allocate((m, hidden_size), torch.float32)
    found = []
    for repeat in range(repeats + 1):
        platform.synchronize()
        start_s = clock()
        there.copy_(rows)
        platform.copy(far, there)
        platform.launch(far)
        platform.copy(back, far)
        platform.wait()
        if repeat:
            found.append((clock() - start_s) / 2)
    return found


def _copy_s(platform: GpuPlatform, copies: Sequence[tuple[Tensor, Tensor]], repeats: int, clock: Clock) -> list[float]:
    """Seconds until all copies, (target, source) each, begun at once, are done; the first of them don't count."""
    works = [partial(platform.copy, target, source) for target, source in copies]
    found = []
    for repeat in range(repeats + 1):
        platform.synchronize()
        start_s = clock()
        if len(works) == 1:
            works[0]()
        else:
            platform.at_once(*works)
        platform.synchronize()
        if repeat:
            found.append(clock() - start_s)
    return found
