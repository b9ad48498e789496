"""Fits the factors of a predictor of active neurons: two matrices of low rank and a bias per FFN.

Like Deja Vu (arXiv 2310.17157) and PowerInfer (arXiv 2312.12456), the fit minimizes the cross-entropy of "is active".
Unlike them, there is no nonlinearity between the factors, and the fit starts from the reduced-rank regression of the
first matrix on the inputs. Each active neuron is weighted by its score (see `curves.py`), so that the fit favours the
neurons that contribute most.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.calibration.predictor_fitting import EPSILON, FIRST_DECAY, SECOND_DECAY

RANK_DIVISOR, RANK_MULTIPLE = 8, 32  # of hidden sizes; int4 tiles hold the multiple without padding
RIDGE = 1e-4  # of the inputs' mean square, for directions that the text lacks
START_DEVIATION, START_BIAS = 2.0, -1.0  # of the initial logits: few neurons are active
RATE, BIAS_RATE = 0.1, 1e-2  # Adam's, relative to a factor's root mean square, and in logits; they fall linearly to 0
TINY = 1e-12


@dataclass(frozen=True, slots=True)
class FactorTraining:
    """Settings of the fit. The number of steps is the same for all texts, except that short texts get fewer."""

    n_steps: int = 300
    batch_tokens: int = 512
    most_passes: int = 40  # over the inputs: more passes over 512 tokens only memorize them
    seed: int = 0

    def steps(self, n_tokens: int) -> int:
        return min(self.n_steps, max(1, self.most_passes * n_tokens // self.batch_tokens))


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Low-rank factors for the logits that neurons are active: outer (inner x) + bias. Shapes, fp32: inner (rank,
    hidden), outer (ffn, rank), bias (ffn,)."""

    inner: Tensor
    outer: Tensor
    bias: Tensor


def rank_of(hidden_size: int) -> int:
    return min(hidden_size, -(-hidden_size // (RANK_DIVISOR * RANK_MULTIPLE)) * RANK_MULTIPLE)


def fit_factors(
    inputs: Tensor, scores: Tensor, first: Tensor, shift: Tensor, rank: int, training: FactorTraining
) -> Factors:
    """Fit the factors of one FFN. The same seed gives the same numbers.

    Args:
        inputs: fp32 (m, hidden).
        scores: bf16 (m, ffn), 0 for inactive neurons.
        first: First matrix (ffn, hidden); a neuron is active if first x + shift is above 0.
        shift: (ffn,).
    """
    start = _regressed(inputs, first, shift, rank)
    parameters = [start.inner, start.outer, start.bias]
    rates = [RATE * float(part.square().mean().sqrt()) for part in parameters[:2]] + [BIAS_RATE]
    moments = [(torch.zeros_like(part), torch.zeros_like(part)) for part in parameters]
    mean_score = float(scores.sum(dtype=torch.float64)) / max(1, int(scores.count_nonzero()))
    random = torch.Generator().manual_seed(training.seed)
    n_steps = training.steps(len(inputs))
    for step in range(n_steps):
        chosen = torch.randint(len(inputs), (training.batch_tokens,), generator=random)
        gradients = _gradients(parameters, inputs[chosen], scores[chosen].float() / max(TINY, mean_score))
        falling = 1 - step / n_steps
        for part, of_part, gradient, rate in zip(parameters, moments, gradients, rates, strict=True):
            _step(part, of_part, gradient, falling * rate, step + 1)
    return Factors(*parameters)


def _gradients(parameters: list[Tensor], inputs: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the cross-entropy, summed over neurons and averaged over tokens.

    counts, (m, ffn), has the weights of active neurons and 0 for inactive ones, whose weight is 1.
    """
    inner, outer, bias = parameters
    low = inputs @ inner.T
    chances = torch.addmm(bias, low, outer.T).sigmoid_()
    error = torch.where(counts > 0, (chances - 1) * counts, chances) / len(inputs)
    return (error @ outer).T @ inputs, error.T @ low, error.sum(0)


def _step(part: Tensor, moments: tuple[Tensor, Tensor], gradient: Tensor, rate: float, step: int) -> None:
    """Take one step of Adam in place. torch's Adam would load its compiler, which needs two seconds."""
    first, second = moments
    first.lerp_(gradient, 1 - FIRST_DECAY)
    second.lerp_(gradient.square(), 1 - SECOND_DECAY)
    corrected = rate * math.sqrt(1 - SECOND_DECAY**step) / (1 - FIRST_DECAY**step)
    part.addcdiv_(first, second.sqrt().add_(EPSILON), value=-corrected)


def _regressed(inputs: Tensor, first: Tensor, shift: Tensor, rank: int) -> Factors:
    """Return scaled factors of this rank whose products with these inputs are closest to those of the first matrix."""
    inputs, first = inputs.double(), first.double()
    moments = inputs.T @ inputs / len(inputs)
    moments.diagonal().add_(RIDGE * moments.diagonal().mean() + TINY)
    root = torch.linalg.cholesky(moments)  # root root^T; the fit minimizes |(first - outer inner) root|
    seen = first @ root
    directions = torch.linalg.eigh(seen.T @ seen).eigenvectors[:, -rank:]
    outer = seen @ directions
    inner = torch.linalg.solve_triangular(root, directions.T, upper=False, left=False)
    scale = START_DEVIATION / outer.square().sum(1).mean().sqrt().clamp_min(TINY)  # inner x has unit moments
    return Factors(inner.float(), (scale * outer).float(), (scale * shift + START_BIAS).float())
