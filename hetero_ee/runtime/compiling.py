"""Compile kernels into an empty cache in other processes, while this one reads or converts a model."""

import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from hetero_ee.config import COMPILING, Progress, cache_folder
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.kernel_cache import KernelCache, use_kernel_cache
from hetero_ee_profiles.host.python_process import start_python

if TYPE_CHECKING:
    from hetero_ee.weights.model_weights import ModelWeights

LIMIT_S = 300.0  # longest wait; this process then compiles what is missing
POLL_S = 0.05
MEASURED_TOKENS = (1, 4)  # batch sizes of a quick profile's decode passes
OWN_TILES = (2, 6, 7, 8)  # numbers of queries that need other attention kernels than one query


class Compilation:
    """Processes that compile the kernels of the first token. As a context manager, it ends them on exit.

    No process is started if only one thread is allowed, or if the cache is already filled or cannot store kernels.
    """

    def __init__(self, kernels: KernelCache, n_threads: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        if n_threads < 2 or not kernels.keeps or kernels.is_filled():
            return
        from hetero_ee_cpu_ops.ahead import GROUPS

        names = list(GROUPS)
        n_first = min(n_threads, len(names)) - 1
        for group in (*([name] for name in names[:n_first]), names[n_first:]):
            with suppress(OSError):  # if it can't start, `finish` compiles its kernels
                self._processes.append(_started(kernels.folder, group))

    @classmethod
    def started(cls, n_threads: int, progress: Progress | None) -> Self:
        """Start to fill the cache folder's kernel cache. This does not import torch."""
        return cls(use_kernel_cache(cache_folder(), progress), n_threads)

    def finish(self, spec: ModelSpec, weights: "ModelWeights", progress: Progress | None) -> None:
        """Compile the products with these weights in this process, wait for the others, and compile what remains."""
        if not self._processes:
            return
        report, n_all = progress or (lambda *_: None), len(self._processes) + 1
        report(COMPILING, 0, n_all)
        _compile_products(weights)
        end_s = time.monotonic() + LIMIT_S
        while (n_running := sum(each.poll() is None for each in self._processes)) and time.monotonic() < end_s:
            report(COMPILING, n_all - n_running, n_all)
            time.sleep(POLL_S)
        for group in {each.n_heads // each.n_kv_heads for each in spec.attentions}:
            _compile_tiles(group)
        report(COMPILING, n_all, n_all)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()  # waits, and closes the pipe


def _started(folder: Path, group: list[str]) -> "subprocess.Popen[bytes]":
    """Start a process that compiles one group. It exits when this process does, which closes its standard input."""
    return start_python(["-m", "hetero_ee_cpu_ops.ahead", str(folder), *group])


def _compile_products(weights: "ModelWeights") -> None:
    from hetero_ee.ops.cpu import CpuOps
    from hetero_ee.weights.weight import TileWeight
    from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool

    ops = CpuOps(ThreadPool(1))
    tiles = (
        ops.matrix(name, each, None).tiles for name, each in weights.matrices.items() if isinstance(each, TileWeight)
    )
    for kind in sorted({each.kind for each in tiles}):
        ops.compile(kind)


def _compile_tiles(group: int) -> None:
    """Compile the further attention kernels of a quick profile, for `group` query heads per key head."""
    from hetero_ee_cpu_ops import ahead

    for n_tokens in MEASURED_TOKENS:
        if group * n_tokens in OWN_TILES:
            ahead.attention(group, n_tokens)
