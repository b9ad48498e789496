"""The optimisers of the demonstration model: Muon for the matrices of the layers, AdamW for the rest."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Float32Muon(torch.optim.Optimizer):
    """torch's Muon (adjusted to AdamW's step), its products in float32 for processors that are slow at bfloat16.

    On Zen 3 a bfloat16 product takes 46 times as long as a float32 one (4096 x 192 x 768, torch 2.13, 2026-11-23).
    """

    def __init__(self, matrices: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in (matrix for matrix in group["params"] if matrix.grad is not None):
                state = self.state[matrix]
                average = state.setdefault("momentum_buffer", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonal(torch.lerp(matrix.grad, average, group["momentum"]))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-0.2 * max(matrix.shape) ** 0.5 * group["lr"])


def orthogonal(matrix: Tensor, n_steps: int = 5) -> Tensor:
    """Near the orthogonal factor of a matrix's polar decomposition: the quintic Newton-Schulz iteration of Muon."""
    first, third, fifth = 3.4445, -4.7750, 2.0315
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(n_steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), wide, beta=first)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


def make_optimizers(
    llama: nn.Module, rates: tuple[float, float], decays: tuple[float, float], precision: torch.dtype
) -> list[torch.optim.Optimizer]:
    """Muon and AdamW with their peak rates and decays; norms have no decay."""
    matrices = [parameter for parameter in llama.layers.parameters() if parameter.ndim == 2]
    norms = [parameter for parameter in llama.parameters() if parameter.ndim == 1]
    embedding = {"params": [llama.embed_tokens.weight], "weight_decay": decays[1]}
    adam = torch.optim.AdamW([embedding, {"params": norms, "weight_decay": 0.0}], rates[1], betas=(0.9, 0.95))
    if precision == torch.float32:
        return [Float32Muon(matrices, rates[0], decays[0]), adam]
    return [torch.optim.Muon(matrices, rates[0], weight_decay=decays[0], adjust_lr_fn="match_rms_adamw"), adam]
