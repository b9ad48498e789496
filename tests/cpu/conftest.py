"""What these tests compile is kept for the run's other processes, whichever of its tests comes first."""

from pathlib import Path

import pytest

from hetero_ee.runtime.kernel_cache import use_kernel_cache


@pytest.fixture(scope="session", autouse=True)
def _kept_kernels(_cache_of_this_run: Path) -> None:
    use_kernel_cache(_cache_of_this_run)
