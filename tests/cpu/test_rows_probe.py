"""What profiles measure of sparse FFNs, on this CPU and on a stand-in GPU."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_ee.ops.registry import Registry
from hetero_ee.profiling.gpu import GpuProbe, measured_gpu
from hetero_ee.profiling.preset import QUICK, Preset, attention_points, product_shapes
from hetero_ee.profiling.rows import SHARES, TOKENS, cpu_rows, gpu_rows
from hetero_ee_profiles.measurement import Origin
from tests.sparse_models import sparse_model
from tests.stand_in_gpu import StandInGpu

ORIGIN = Origin("a test", "2026-11-23", "none")
PRESET = replace(QUICK, cycle_bytes=2**15)
TINY = Preset((1, 17), ((1, 20),), 2, 2**16, 2**16, 0.0, 1.0, 0.0, 1.0)
TORCH = Registry(lambda package: package == "torch")


@pytest.mark.parametrize(("family", "n_matrices"), [("llama-relu", 2), ("opt", 1)])
@pytest.mark.sample(0)
def test_every_number_of_tokens_and_share_is_timed(family: str, n_matrices: int, kernels: Path) -> None:
    spec, _ = sparse_model(family)
    found = cpu_rows(spec, 1, PRESET, ORIGIN, time.perf_counter), gpu_rows(spec, StandInGpu(), TORCH, PRESET, ORIGIN)
    for rows in found:
        assert [(row.m, row.active_share) for row in rows] == [(m, share) for m in TOKENS for share in SHARES]
        assert {(row.n_rows, row.n_columns) for row in rows} == {(n_matrices * spec.ffn_size, spec.hidden_size)}
        assert all(row.time.value > 0 for row in rows)


def test_a_gpu_that_fails_at_it_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object) -> None:
        raise RuntimeError("CUDA error: no rows today")

    monkeypatch.setattr("hetero_ee.profiling.gpu.gpu_rows", failing)
    monkeypatch.setattr("hetero_ee.profiling.cpu.READ_BYTES", 2**20)
    gpu, (spec, _) = StandInGpu(), sparse_model("llama-relu")
    dense = replace(spec, neuron_major=False)
    probe = GpuProbe(gpu, TORCH, TINY, ORIGIN, gpu.clock)
    arguments = probe, dense, product_shapes(dense), attention_points(TINY)
    assert measured_gpu(*arguments).warning == ""
    found = measured_gpu(*arguments, sparse=spec)
    assert found.times is None and "no rows today" in found.warning
