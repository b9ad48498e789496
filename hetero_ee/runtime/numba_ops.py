"""The operations on the CPU's fast kernels, under the names of `TorchOps`, and where their compiled form is kept."""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hetero_ee.config import Progress
from hetero_ee.runtime.torch_ops import TorchOps
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.weight import TileWeight, Weight

COMPILING = "Compiling the CPU kernels"

if TYPE_CHECKING:
    from hetero_ee_cpu_ops.matmul import TileMatrix


def kernel_cache_folder(cache: Path) -> Path:
    """Where compiled kernels lie: one folder for each state of their sources, so that an edit can't meet an old one.

    Numba itself keys what lies in it by its version, CPU name and features, but overlooks edits to imported modules.
    """
    spec = find_spec("hetero_ee_cpu_ops")
    assert spec is not None and spec.origin is not None
    digest = hashlib.sha256()
    for file in sorted(Path(spec.origin).parent.glob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return cache / "kernels" / digest.hexdigest()[:16]


class NumbaOps(TorchOps):
    """int4 and int8 matrices are multiplied by compiled kernels, with int8 activations; dense ones as in TorchOps.

    threads: 1 or more. Compiles at first use (some seconds, once on a machine) into `cache`.
    """

    def __init__(self, threads: int, cache: Path) -> None:
        import numba

        folder = kernel_cache_folder(cache)
        self._is_first_use = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        numba.config.CACHE_DIR = str(folder)  # before the kernels' modules are imported: they look once
        from hetero_ee_cpu_ops.matmul import Matmul
        from hetero_ee_cpu_ops.team import Team

        self._team = Team(threads)
        self._matmul = Matmul(self._team)
        self._matrices: dict[int, tuple[Weight, TileMatrix]] = {}

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias: (m, K) -> (m, N)."""
        if not isinstance(weight, TileWeight):
            return super().linear(x, weight, bias)
        product = torch.from_numpy(self._matmul(_contiguous(x), self._matrix(weight)))[:, : weight.n_rows]
        return product if bias is None else product + bias

    def prepare(self, weights: ModelWeights, progress: Progress | None = None) -> None:
        """Compiles the kernels these weights need, or loads them from the disk."""
        tiles = [weight for weight in weights.matrices.values() if isinstance(weight, TileWeight)]
        kinds = sorted({self._matrix(weight).kind for weight in tiles})
        for n_done, kind in enumerate(kinds):
            if progress and self._is_first_use:
                progress(COMPILING, n_done, len(kinds))
            self._matmul.compile(kind)
        if progress and self._is_first_use:
            progress(COMPILING, len(kinds), len(kinds))

    def close(self) -> None:
        """Ends the threads."""
        self._team.close()

    def _matrix(self, weight: TileWeight) -> "TileMatrix":
        """The weight as the kernels take it, made once."""
        from hetero_ee_cpu_ops.matmul import TileMatrix

        found = self._matrices.get(id(weight))
        if found is None:
            matrix = TileMatrix(weight.tiles.numpy(), weight.scales.numpy(), weight.exponent, weight.codebook)
            found = self._matrices[id(weight)] = (weight, matrix)
        return found[1]


def _contiguous(x: Tensor) -> Any:
    return np.ascontiguousarray(x.numpy(), dtype=np.float32)
