"""The optimisers of the small models trained here: Muon for the matrices of the layers, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class StackedMuon(torch.optim.Optimizer):
    """torch's Muon (adjusted to AdamW's step), for stacks of matrices too, and with products of a given precision.

    On Zen 3 a bfloat16 product takes 46 times as long as a float32 one (4096 x 192 x 768, torch 2.13, 2026-11-23).
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        lr: float,
        weight_decay: float,
        precision: torch.dtype,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.precision = precision

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in (matrix for matrix in group["params"] if matrix.grad is not None):
                state = self.state[matrix]
                average = state.setdefault("momentum_buffer", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonal(torch.lerp(matrix.grad, average, group["momentum"]).to(self.precision))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-0.2 * max(matrix.shape[-2:]) ** 0.5 * group["lr"])


def orthogonal(matrix: Tensor, n_steps: int = 5) -> Tensor:
    """Near the orthogonal factors of matrices' polar decompositions: the quintic Newton-Schulz iteration of Muon."""
    first, third, fifth = 3.4445, -4.7750, 2.0315
    wide = matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(n_steps):
        gram = wide @ wide.mT
        wide = first * wide + (third * gram + fifth * (gram @ gram)) @ wide
    return wide.mT if matrix.shape[-2] > matrix.shape[-1] else wide


class Sorted(NamedTuple):
    """A model's parameters by how they are trained."""

    matrices: list[nn.Parameter]  # Muon, with decay
    embeddings: list[nn.Parameter]  # AdamW, with decay
    others: list[nn.Parameter]  # AdamW, without decay


def sort_parameters(
    model: nn.Module, is_small: Callable[[str, nn.Parameter], bool] = lambda name, parameter: parameter.ndim == 1
) -> Sorted:
    """A model's parameters by how they are trained; `is_small` tells which are no matrices to orthogonalize."""
    found = Sorted([], [], [])
    for name, parameter in model.named_parameters():
        kind = 2 if is_small(name, parameter) else 1 if "embed_tokens" in name else 0
        found[kind].append(parameter)
    return found


def make_optimizers(
    parameters: Sorted, rates: tuple[float, float], decays: tuple[float, float], precision: torch.dtype
) -> list[torch.optim.Optimizer]:
    """Muon and AdamW with their peak rates and decays; norms and other small parameters have no decay."""
    embeddings = {"params": parameters.embeddings, "weight_decay": decays[1]}
    others = {"params": parameters.others, "weight_decay": 0.0}
    adam = torch.optim.AdamW([embeddings, others], rates[1], betas=(0.9, 0.95))
    matrices = parameters.matrices
    if precision == torch.float32 or any(matrix.ndim > 2 for matrix in matrices):
        return [StackedMuon(matrices, rates[0], decays[0], precision), adam]
    return [torch.optim.Muon(matrices, rates[0], weight_decay=decays[0], adjust_lr_fn="match_rms_adamw"), adam]
