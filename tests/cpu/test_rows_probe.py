"""What profiles measure of sparse FFNs, on this CPU and on a stand-in GPU."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_ee.ops.registry import Registry
from hetero_ee.profiling.gpu import GpuMetrics, with_rows
from hetero_ee.profiling.preset import QUICK
from hetero_ee.profiling.rows import SHARES, TOKENS, cpu_rows, gpu_rows
from hetero_ee_profiles.measurement import Origin
from hetero_ee_profiles.reference import reference_profile
from tests.emulation import LAPTOP
from tests.sparse_models import sparse_model
from tests.stand_in_gpu import StandInGpu

ORIGIN = Origin("a test", "2026-11-23", "none")
PRESET = replace(QUICK, cycle_bytes=2**15)
TORCH = Registry(lambda package: package == "torch")


@pytest.mark.parametrize(("family", "n_matrices"), [("llama-relu", 2), ("opt", 1)])
def test_every_number_of_tokens_and_share_is_timed(family: str, n_matrices: int, kernels: Path) -> None:
    spec, _ = sparse_model(family)
    found = cpu_rows(spec, 1, PRESET, ORIGIN, time.perf_counter), gpu_rows(spec, StandInGpu(), TORCH, PRESET, ORIGIN)
    for rows in found:
        assert [(row.m, row.active_share) for row in rows] == [(m, share) for m in TOKENS for share in SHARES]
        assert {(row.n_rows, row.n_columns) for row in rows} == {(n_matrices * spec.ffn_size, spec.hidden_size)}
        assert all(row.time.value > 0 for row in rows)


def test_a_gpu_that_fails_at_it_gives_a_warning() -> None:
    gpu = StandInGpu(fail="allocate", error=RuntimeError("CUDA error: no rows today"))
    profile, (spec, _) = reference_profile(LAPTOP), sparse_model("llama-relu")
    found = with_rows(GpuMetrics(profile.gpu, profile.link), spec, gpu, TORCH, PRESET, ORIGIN)
    assert found.times is None and "no rows today" in found.warning
