"""Record which experts a text's tokens choose: how often each one, and how many that no recent token has chosen.

Of each block with experts, routes have "<block>.chosen_share", (2, n_experts): the share of each expert in the choices
of each half of the text, and "<block>.new_experts", (N_RECENT,): the share of a token's experts that none of the last
0, 1, ... tokens chose.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hetero_ee.calibration.traces import FIRST_COUNTED
from hetero_ee.kv.batch import Batch
from hetero_ee.layers.moe import MoeSpec
from hetero_ee.layers.ops import Router
from hetero_ee.models.blocks import Block, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.cpu import CpuOps
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.host import OpsExecutor
from hetero_ee.weights.store.record import Arrays
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool

CHOSEN, NEW = "chosen_share", "new_experts"
N_RECENT = 8


def expert_blocks(spec: ModelSpec) -> list[tuple[Block, MoeSpec]]:
    return [(block, block.mixer) for block in decoder_blocks(spec) if isinstance(block.mixer, MoeSpec)]


def route_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a calibration's routes by name; none for a model without experts."""
    sizes = ((block.name, mixer.router.n_experts) for block, mixer in expert_blocks(spec))
    return {f"{name}.{kind}": shape for name, n in sizes for kind, shape in ((CHOSEN, (2, n)), (NEW, (N_RECENT,)))}


class RouteRecorder(CpuOps):
    """The CPU's operations, which also keep the experts of each pass: masks (m, n_experts), a block after another."""

    def __init__(self, pool: ThreadPool) -> None:
        super().__init__(pool)
        self.chosen: list[Any] = []

    def route(self, x: Any, router: Router) -> Any:
        routes = super().route(x, router)
        chosen = np.zeros((len(x), router.spec.n_experts), np.bool_)
        np.put_along_axis(chosen, routes[:, : router.spec.n_active].astype(np.int64), values=True, axis=1)
        self.chosen.append(chosen)
        return routes


def recorded_routes(executor: Executor, pool: ThreadPool, chunks: Sequence[Sequence[int]]) -> Arrays:
    """Run at least two chunks of text on the CPU, whichever devices the executor has, and return their routes.

    A GPU's passes may be graphs, which no Python code can watch. Experts have the numbers of the model's files.
    """
    spec, weights, recorder = executor.spec, executor.weights, RouteRecorder(pool)
    runner = OpsExecutor(spec, weights, max(map(len, chunks)), recorder)
    sums: Arrays = {name: np.zeros(shape) for name, shape in route_shapes(spec).items()}
    for number, chunk in enumerate(chunks):
        sequence = runner.cache.open_new()
        runner.hidden(Batch.of_sequence(sequence, 0, list(chunk)))
        runner.cache.close(sequence)
        for (block, _), chosen in zip(expert_blocks(spec), recorder.chosen, strict=True):
            order = weights.expert_orders.get(block.name, slice(None))
            sums[f"{block.name}.{CHOSEN}"][number % 2][order] += chosen[FIRST_COUNTED:].sum(0)
            sums[f"{block.name}.{NEW}"] += _new_experts(chosen)
        recorder.chosen.clear()
    for name, array in sums.items():
        sums[name] = (array / (array[0] if array.ndim == 1 else array.sum(1, keepdims=True))).astype(np.float32)
    return sums


def _new_experts(chosen: Any) -> Any:
    """Count tokens' experts that none of the last 0, 1, ... tokens chose, (m, n_experts) -> (N_RECENT,).

    The chunk's last tokens precede its first ones, which have no others.
    """
    last = [np.roll(chosen, distance, axis=0) for distance in range(1, N_RECENT)]
    return np.array([(chosen & ~np.any(last[:n], axis=0))[FIRST_COUNTED:].sum() for n in range(N_RECENT)])
