"""Code is loaded once in a process, however many executors use it: Numba never gives any back, and a process whose
table of mappings is full dies in the code it loaded last."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.matmul import Matmul, TileMatrix
from hetero_ee_cpu_ops.read import Read

MAPPINGS = Path("/proc/self/maps")
CODEBOOKS = {"bytes": None, "linear": tuple(range(-8, 8)), "codebook": tuple(range(-16, 16, 2))}


def matrix(codebook: tuple[int, ...] | None) -> TileMatrix:
    tiles = np.zeros((1, 1, 512), np.int8) if codebook is None else np.zeros((1, 1, 256), np.uint8)
    return TileMatrix(tiles, np.ones((1, 1, 16), np.float16), 0, codebook)


def used_once(pool: ThreadPool) -> None:
    x = np.ones((1, 32), np.float32)
    for codebook in CODEBOOKS.values():
        Matmul(pool)(x, matrix(codebook))
    Read(pool)(np.zeros(256, np.uint8))


@pytest.mark.skipif(not MAPPINGS.exists(), reason="needs /proc")
@pytest.mark.sample(0)
def test_more_executors_take_no_more_mappings() -> None:
    def n_mappings() -> int:
        return len(MAPPINGS.read_text().splitlines())

    pool = ThreadPool(1)
    used_once(pool)
    before = n_mappings()
    for _ in range(25):
        used_once(pool)
    assert n_mappings() < before + 25


@pytest.mark.parametrize("kind", CODEBOOKS)
def test_every_instance_calls_the_same_code(kind: str) -> None:
    weight: Any = matrix(CODEBOOKS[kind])
    assert len({Matmul(ThreadPool(1)).functions(weight.kind) for _ in range(3)}) == 1
