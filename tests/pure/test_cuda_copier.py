"""Hidden states between the CPU and a GPU: buffers that were there before, none of them used while it is in use."""

import pytest
import torch

from hetero_ee.errors import DeviceMemoryError
from hetero_ee.runtime.devices.cuda import CudaLink
from hetero_ee.runtime.devices.cuda_copier import N_BUFFERS, CudaCopier
from hetero_ee.runtime.devices.emulated import EmulatedGpuTensor
from tests.stand_in_cuda import StandInCuda
from tests.stand_in_machine import StandInCopier

N_ROWS, WIDTH = 3, 4


def copier_on(driver: StandInCuda) -> StandInCopier:
    return StandInCopier(driver, CudaLink(driver, lambda: 0), N_ROWS, 4 * WIDTH)


def rows(n: int, value: float) -> torch.Tensor:
    return torch.full((n, WIDTH), float(value))


def test_there_and_back() -> None:
    copier, x = copier_on(StandInCuda()), torch.arange(8.0).view(2, WIDTH)
    there = copier.to_gpu(x)
    assert copier.is_on_gpu(there) and not copier.is_on_gpu(x)
    assert copier.to_gpu(there) is there and torch.equal(there.as_subclass(torch.Tensor), x)
    back = copier.to_cpu(there)
    assert not copier.is_on_gpu(back) and torch.equal(back, x)


def test_a_real_gpus_tensors_are_told_by_their_device() -> None:
    driver = StandInCuda()
    copier = CudaCopier(driver, CudaLink(driver, lambda: 0), N_ROWS, 4 * WIDTH)
    x = rows(1, 1.0)
    assert not copier.is_on_gpu(x) and copier.to_cpu(x) is x
    assert not copier.is_on_gpu(x.as_subclass(EmulatedGpuTensor))


def test_what_was_moved_outlasts_the_next_calls() -> None:
    copier = copier_on(StandInCuda())
    on_gpu = [copier.to_gpu(rows(N_ROWS, value)) for value in range(N_BUFFERS)]
    for value, x in enumerate(on_gpu):
        assert bool((x == value).all())
    on_cpu = [copier.to_cpu(x) for x in on_gpu]
    for value, x in enumerate(on_cpu):
        assert bool((x == value).all())


def test_the_host_waits_before_it_writes_over_what_is_being_copied() -> None:
    driver = StandInCuda()
    copier = copier_on(driver)
    for _ in range(N_BUFFERS):
        copier.to_gpu(rows(1, 0.0))
    recorded = [event for _, what, event in driver.log if what == "records"]
    assert len(recorded) == N_BUFFERS and "waits for" not in {what for _, what, _ in driver.log}
    for turn in range(2):
        copier.to_gpu(rows(1, 0.0))
        waits = [event for who, what, event in driver.log if (who, what) == ("host", "waits for")]
        assert waits == recorded[: turn + 1]


@pytest.mark.parametrize("what", ["pinned", "empty"])
def test_nothing_is_allocated_but_for_more_rows_than_usual(what: str) -> None:
    driver = StandInCuda(error=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB."))
    copier, link = copier_on(driver), CudaLink(driver, lambda: 0)
    driver.fail = what
    for value in range(2 * N_BUFFERS):
        assert bool((copier.to_cpu(copier.to_gpu(rows(N_ROWS, value))) == value).all())
    with pytest.raises(DeviceMemoryError):
        link.transfer("rows", N_ROWS + 1, 4 * WIDTH, "gpu", lambda: copier.to_gpu(rows(N_ROWS + 1, 0.0)))
    driver.fail = ""
    for value in range(2 * N_BUFFERS):
        more = rows(5 * N_ROWS, value)
        assert torch.equal(copier.to_cpu(copier.to_gpu(more)), more)


def test_buffers_of_the_gpu_are_of_the_stream_that_computes() -> None:
    """Else torch could give their memory away while another stream still reads it."""
    made_on: list[str] = []

    class Watched(StandInCuda):
        def empty(self, shape: object, dtype: torch.dtype) -> torch.Tensor:
            made_on.append(self.compute_stream().name)
            return torch.empty(shape, dtype=dtype)  # type: ignore[call-overload,no-any-return]

    driver = Watched()
    copier, link = copier_on(driver), CudaLink(driver, lambda: 0)
    link.transfer("rows", 9, 4 * WIDTH, "gpu", lambda: copier.to_gpu(rows(9, 0.0)))
    assert made_on == ["compute"] * (N_BUFFERS + 1)
