"""The order of experts by how many tokens of a calibration's text chose them, the most popular first.

With it, "hot-N" placements hold the experts that save the CPU most of its reads. All experts of a model are reordered,
wherever they are: outputs are added by the experts' order, so that the sum's bits don't depend on the placement.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from hetero_ee.calibration.routes import CHOSEN, NEW, expert_blocks
from hetero_ee.models.spec import CURVE_POINTS, ModelSpec
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.weight import TileWeight

PER_EXPERT = "router", "choice", "factors"  # vectors with a row per expert, as biases of experts' matrices have


@dataclass(frozen=True, slots=True, eq=False)
class ExpertOrder:
    """Expert numbers of every layer with experts, the most popular first, and what planning expects of them."""

    order: dict[str, Tensor]  # int64 (n_experts,) by block name
    curve: tuple[float, ...]  # see ModelSpec.hot_curve
    independent_tokens: tuple[float, ...]  # see ModelSpec

    @classmethod
    def of(cls, spec: ModelSpec, routes: Mapping[str, Any]) -> Self | None:
        """Return the order by a calibration's routes, None without any.

        The curve of each half of the text is counted in the order of the other half, so that chance does not flatter.
        """
        orders, curves, tokens = dict[str, Tensor](), [], []
        for block, mixer in expert_blocks(spec) if routes else ():
            n, halves = mixer.router.n_experts, routes[f"{block.name}.{CHOSEN}"].astype(np.float64)
            active_share = min(mixer.router.n_active / n, 0.999)
            for counted, other in zip(halves, halves[::-1], strict=True):
                taken = np.concatenate([[0], counted[np.argsort(-other, kind="stable")].cumsum()])
                curves.append(np.interp(np.arange(1, CURVE_POINTS + 1) * n / CURVE_POINTS, np.arange(n + 1), taken))
            unions = active_share * routes[f"{block.name}.{NEW}"].astype(np.float64).cumsum()
            tokens.append([log(1 - min(union, 0.999)) / log(1 - active_share) for union in unions])
            orders[block.name] = torch.from_numpy(np.argsort(-halves.sum(0), kind="stable"))
        if not orders:
            return None
        return cls(orders, *(tuple(map(float, np.mean(each, axis=0))) for each in (curves, tokens)))

    def expected(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec with what planning expects of a model in this order."""
        return replace(spec, hot_curve=self.curve, independent_tokens=self.independent_tokens)

    def applied(self, spec: ModelSpec, weights: ModelWeights) -> tuple[ModelSpec, ModelWeights]:
        """Return the spec for planning, and the weights copied into this order."""
        matrices, vectors, held_bytes = dict(weights.matrices), dict(weights.vectors), weights.held_bytes
        for block, mixer in expert_blocks(spec):
            order = self.order[block.name]
            for short, tensor in block.tensors.items():
                if short in mixer.expert_matrices:
                    weight = matrices[tensor.name]
                    assert isinstance(weight, TileWeight), "experts are in tiles"
                    parts = _by_expert(weight.tiles, order), _by_expert(weight.scales, order)
                    matrices[tensor.name] = replace(weight, tiles=parts[0], scales=parts[1])
                    held_bytes += weight.n_bytes
                elif short.removesuffix("_bias") in (*mixer.expert_matrices, *PER_EXPERT):
                    vectors[tensor.name] = _by_expert(vectors[tensor.name], order)
        made = replace(weights, matrices=matrices, vectors=vectors, held_bytes=held_bytes, expert_orders=self.order)
        return self.expected(spec), made


def _by_expert(x: Tensor, order: Tensor) -> Tensor:
    return x.view(len(order), -1, *x.shape[1:])[order].view(x.shape)
