"""The GPU's part of a profile: whole with a GPU that works, a warning with one that fails anywhere."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.registry import Registry
from hetero_ee.profiling.gpu import GpuMetrics, GpuProbe, measured_gpu
from hetero_ee.profiling.machine_profile import with_free_memory
from hetero_ee.profiling.preset import Preset, attention_points, product_shapes
from hetero_ee_kernels import reference
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.measurement import Origin
from hetero_ee_profiles.records import from_json, to_json
from hetero_ee_profiles.reference import derived_profile
from tests.families import config_of
from tests.shipped import DATA_SHEETS
from tests.stand_in_gpu import METHODS, StandInGpu

ORIGIN = Origin("a test", "2026-11-21", "versions")
TINY = Preset((1, 17), ((1, 20),), 2, 2**16, 2**16, 0.0, 1.0, 0.0, 1.0)
PROFILE = derived_profile(DATA_SHEETS[0], "2026-11-21")


@pytest.fixture(autouse=True, scope="module")
def _little_is_read() -> Iterator[None]:
    """Of this machine's memory: what the stand-in does meanwhile is scripted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero_ee.profiling.cpu.READ_BYTES", 2**20)
        yield


def spec_of(family: str = "llama") -> ModelSpec:
    return read_spec(config_of(family, num_hidden_layers=2))


def metrics(gpu: StandInGpu, family: str = "llama", installed: Sequence[str] = ("torch",)) -> GpuMetrics:
    """Measured with torch's operations, which run on a CPU."""
    spec = spec_of(family)
    registry = Registry(lambda name: name in installed)
    shapes, points = product_shapes(spec), attention_points(TINY)
    return measured_gpu(GpuProbe(gpu, registry, TINY, ORIGIN, gpu.clock), spec, shapes, points)


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "phi3-partial", "llama-tied"])
def test_a_gpu_that_works_is_measured_whole(family: str) -> None:
    gpu, spec = StandInGpu(), spec_of(family)
    found = metrics(gpu, family)
    assert found.warning == "" and found.times is not None and found.link is not None
    expected = {(s.layout, s.n_rows, s.n_columns, m) for s in product_shapes(spec) for m in TINY.tokens}
    assert {(t.layout, t.n_rows, t.n_columns, t.m) for t in found.times.matmuls} == expected
    assert [(a.m, a.context_tokens) for a in found.times.attentions] == attention_points(TINY)
    assert [row.m for row in found.times.overheads] == list(TINY.tokens)
    assert found.times.threads == 0 and found.times.free_bytes == 2**25
    profile = replace(PROFILE, gpu=found.times, link=found.link)
    assert from_json(HardwareProfile, to_json(profile)) == profile


def test_many_rows_are_one_product_as_in_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[int, torch.dtype]] = set()

    def multiply(x: Any, matrix: Any, out: Any) -> None:
        seen.add((len(x), x.dtype))

    monkeypatch.setattr(reference, "matmul", multiply)
    assert metrics(StandInGpu()).warning == ""
    assert {dtype for _, dtype in seen} == {torch.float32} and {m for m, _ in seen} == {1, 17}


def test_every_figure_of_the_link_is_in_its_place() -> None:
    link = metrics(StandInGpu()).link
    assert link is not None
    rates = (link.both_ways_bytes_per_s, link.to_gpu_bytes_per_s, link.to_cpu_bytes_per_s)
    pageable = (link.pageable_to_gpu_bytes_per_s, link.pageable_to_cpu_bytes_per_s)
    times = (link.launch, link.transfer, link.synchronize, link.latency)  # the stand-in's order
    falling, rising = ([figure.value for figure in group] for group in ((*rates, *pageable), times))
    assert falling == sorted(falling, reverse=True) and rising == sorted(rising) and len(set(rising)) == 4
    assert {figure.unit for figure in (*rates, *pageable)} == {"B/s"} and {figure.unit for figure in times} == {"s"}


@pytest.fixture(scope="module")
def n_calls() -> dict[str, int]:
    """How often a measurement that succeeds calls each method."""
    gpu = StandInGpu()
    assert metrics(gpu).warning == ""
    return gpu.calls


@pytest.mark.parametrize("method", [name for name in METHODS if name != "recorded"])
@pytest.mark.sample(3)
def test_a_fault_at_any_call_leaves_the_gpu_out(method: str, n_calls: dict[str, int]) -> None:
    for n in sorted({1, (1 + n_calls[method]) // 2, n_calls[method]}):
        gpu = StandInGpu(fail=method, n=n)
        found = metrics(gpu)
        assert found.times is found.link is None
        assert found.warning.startswith("the GPU couldn't be measured (CUDA error: an illegal memory access")
        assert gpu.held_bytes == 0


ERRORS = {
    "out of memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), "CUDA out of memory"),
    "of a compiler": (type("PTXASError", (Exception,), {})("ptxas failed\n.version 8.7\n" * 999), "ptxas failed"),
    "no words": (KeyError(), "KeyError"),
    "blank lines": (OSError("\n \n gcc is missing"), "(gcc is missing)"),
    "control characters": (ImportError("\x1b[31mred"), r"\x1b[31mred"),
    "very long": (ValueError("x" * 9999), "x..."),
}


@pytest.mark.parametrize("name", ERRORS)
def test_whatever_is_raised_is_told_in_one_line(name: str) -> None:
    error, words = ERRORS[name]
    warning = metrics(StandInGpu(fail="allocate", error=error, n=20)).warning
    assert words in warning and warning.isprintable() and len(warning) < 400


def test_an_interruption_is_no_fault() -> None:
    with pytest.raises(KeyboardInterrupt):
        metrics(StandInGpu(fail="seconds", error=KeyboardInterrupt()))


def test_a_card_without_room_is_left_out() -> None:
    assert "out of memory" in metrics(StandInGpu(usable_bytes=2**10)).warning


def test_without_a_matmul_for_it_the_gpu_is_left_out() -> None:
    found = metrics(StandInGpu(), installed=())
    assert found.times is None and "nothing on this machine computes" in found.warning


def test_a_kept_profile_has_the_memory_that_is_free_now() -> None:
    found = with_free_memory(PROFILE, StandInGpu(12345))
    assert found.gpu is not None and found.gpu.free_bytes == 12345
    assert replace(found, gpu=PROFILE.gpu) == PROFILE


@pytest.mark.parametrize(
    "gpu, problem", [(None, "the driver is gone"), (StandInGpu(fail="free_bytes"), ""), (None, "")]
)
def test_a_kept_profile_goes_without_a_gpu_that_fails_now(gpu: Any, problem: str) -> None:
    found = with_free_memory(PROFILE, gpu, problem)
    assert found.gpu is found.link is None and found.cpu == PROFILE.cpu
    assert (problem or ("illegal memory" if gpu else "torch finds none")) in found.warnings[-1]


def test_a_profile_without_a_gpu_stays_as_it_is() -> None:
    profile = replace(PROFILE, gpu=None, link=None)
    assert with_free_memory(profile, StandInGpu()) is profile


def test_the_shown_profile_has_the_gpu_and_the_link() -> None:
    from hetero_ee_cli.commands import profile as command

    shown = command._shown(PROFILE, "a model")
    assert "GPU: 7.4 GiB free, memory copied 256.0 GB/s" in shown and "link: GB/s, then microseconds" in shown
    assert shown.count("rest of a layer") == 2 and "both at once, together" in shown
    alone = command._shown(replace(PROFILE, gpu=None, link=None, warnings=("the GPU couldn't be measured",)), "a model")
    assert "link" not in alone and alone.endswith("the GPU couldn't be measured")
