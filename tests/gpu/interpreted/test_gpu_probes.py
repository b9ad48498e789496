"""The GPU's probes with the kernels they time: what they launch is accepted, and every figure is there."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_ee.hub.config_file import read_spec
from hetero_ee.ops.registry import Registry
from hetero_ee.profiling import gpu as gpu_profiling
from hetero_ee.profiling.gpu import GpuProbe, measured_gpu
from hetero_ee.profiling.preset import QUICK, Preset, product_shapes
from hetero_ee_profiles.gpu.platform import cuda_platform
from hetero_ee_profiles.measurement import Origin
from tests.families import config_of
from tests.gpu_support import IS_INTERPRETED
from tests.stand_in_gpu import StandInGpu

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"head_dim": 16, "num_hidden_layers": 1, "vocab_size": 30}
TINY = Preset((1, 17), ((1, 70),), 1, 1, 2**16, 0.0, 1.0, 0.0, 1.0)
ORIGIN = Origin("a test", "2026-11-21", "versions")


@pytest.mark.sample(0)
def test_a_whole_profile_with_tritons_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_profiling, "MANY_LAYERS", 2)
    monkeypatch.setattr(gpu_profiling, "CALL_SHAPE", replace(gpu_profiling.CALL_SHAPE, n_layers=2))
    platform: Any = StandInGpu(l2_bytes=1) if IS_INTERPRETED else cuda_platform(None)
    spec = read_spec(config_of("qwen3", **SMALL))
    registry = Registry(lambda name: name == "triton")
    shapes, points = product_shapes(spec), [(1, 16), (1, 70), (17, 17)]
    found = measured_gpu(GpuProbe(platform, registry, TINY, ORIGIN, _clock(platform)), spec, shapes, points)
    assert found.warning == "" and found.times is not None and found.link is not None
    assert len(found.times.matmuls) == 2 * len(shapes) and len(found.times.attentions) == 3
    assert [row.m for row in found.times.overheads] == [1, 17]
    if IS_INTERPRETED:
        # One for each product and the smallest, one for each attention, one for each depth of a segment: of one row, as
        # prompts are not recorded.
        assert platform.n_recorded == 2 * len(shapes) + 1 + 3 + 2
        assert platform.held_bytes == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times of a GPU")
def test_figures_of_a_gpu_make_sense() -> None:
    platform = cuda_platform(None)
    assert platform is not None
    spec = read_spec(config_of("llama", hidden_size=2048, intermediate_size=5632, num_attention_heads=32))
    thorough = replace(QUICK, repeats=5)
    points = [(1, 16), (1, 1024), (4, 16), (128, 128)]
    found = measured_gpu(
        GpuProbe(platform, Registry(), thorough, ORIGIN, _clock(None)), spec, product_shapes(spec), points
    )
    assert found.warning == "" and found.times is not None and found.link is not None
    assert found.times.read_bytes_per_s.value > 50e9 and found.link.to_gpu_bytes_per_s.value > 0.5e9
    assert found.link.to_gpu_bytes_per_s.value >= 0.9 * found.link.pageable_to_gpu_bytes_per_s.value
    assert 1e-7 < found.link.launch.value < found.link.synchronize.value < 1e-3
    assert 1e-6 < found.link.transfer.value < 1e-3
    for row in found.times.matmuls:  # no product is faster than reading its weights, even out of the L2 cache
        assert row.time.value > row.n_rows * row.n_columns * 0.5 / 20e12


def _clock(platform: Any) -> Any:
    import time

    return platform.clock if IS_INTERPRETED and platform is not None else time.perf_counter
