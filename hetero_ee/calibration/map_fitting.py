"""Fits exit maps in closed form: ridge regression on streamed normal equations, rank reduced in the lm_head's metric.

For rows z = (x, 1) and residuals r = y - x, the fit minimizes |r - z B|^2 + ridge |B_x|^2. This needs only the sums S =
sum z^T z and T = sum z^T r in float64. An error e in y is weighted by its effect on the logits: e G e^T with G = sum
over tokens of (w - mean w)^T (w - mean w), since a constant added to all logits changes nothing. Let M = G^(1/2), and
let S_c be S centred. The best W of rank k in that metric is B_x M V V^T M^-1, where V has the first k eigenvectors of M
B_x^T (S_c + ridge I) B_x M.

Source: reduced-rank regression (Izenman 1975) with ridge, derived for this metric.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.calibration.traces import chosen_tokens
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.weights.weight import Weight

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)  # relative to a feature's mean square
RANK_SHARES = (16, 8, 4)  # the ranks tried are hidden_size over these, and full rank
MAX_FULL_RANK_FEATURES = 1024  # larger full matrices are slower to read than some layers, and slow to decompose
WIDE_RANK_SHARES = (64, 32, 16)  # for such models, without full rank
SUBSPACE_STEPS = 8  # steps of the subspace iteration
WORTH_A_RANK = 0.005  # agreement that a larger map has to gain
SIGNIFICANT = 2.0  # standard deviations by which a map has to be better, since the best of several looks too good
METRIC_BLOCK_TOKENS = 4096  # rows of the lm_head expanded at once
METRIC_FLOOR = 1e-6  # of the mean eigenvalue: directions the lm_head does not see stay invertible


class NormalEquations:
    """Sums of one exit layer: S is `products`, T is `targets`. add() changes them in place."""

    def __init__(self, hidden_size: int) -> None:
        self.products = torch.zeros(hidden_size + 1, hidden_size + 1, dtype=torch.float64)
        self.targets = torch.zeros(hidden_size + 1, hidden_size, dtype=torch.float64)

    def add(self, normed: Tensor, final: Tensor) -> None:
        """Add tokens, given their normed states (m, hidden) at the exit layer and after the last layer."""
        rows = torch.cat([normed.double(), torch.ones(len(normed), 1, dtype=torch.float64)], dim=1)
        self.products.addmm_(rows.T, rows)
        self.targets.addmm_(rows.T, (final - normed).double())

    @property
    def is_usable(self) -> bool:
        """Whether there are tokens to fit, and all sums are finite."""
        is_finite = bool(torch.isfinite(self.products).all() and torch.isfinite(self.targets).all())
        return is_finite and float(torch.diagonal(self.products)[:-1].mean()) > 0

    def solution(self, ridge: float) -> Tensor:
        """Return B, (hidden + 1, hidden), for a ridge relative to the mean square of a feature."""
        return torch.cholesky_solve(self.targets, torch.linalg.cholesky(self.products + self._penalty(ridge)))

    def energy(self, ridge: float) -> Tensor:
        """Return the features' centred Gram matrix (hidden, hidden), with the ridge added to its diagonal."""
        sums, inner = self.products[-1, :-1], self.products[:-1, :-1]
        return inner - torch.outer(sums, sums) / self.products[-1, -1] + self._penalty(ridge)[:-1, :-1]

    def bias(self, slope: Tensor) -> Tensor:
        """Return the bias for W = slope: the mean residual minus the mean feature times W."""
        n_rows = self.products[-1, -1]
        return self.targets[-1] / n_rows - (self.products[-1, :-1] / n_rows) @ slope

    def _penalty(self, ridge: float) -> Tensor:
        """Return the ridge as a diagonal matrix whose last entry, for the bias, is 0."""
        diagonal = torch.diagonal(self.products)[:-1]
        scale = float(diagonal.mean())
        penalty = torch.full((len(self.products),), ridge * scale, dtype=torch.float64)
        penalty[-1] = 0.0
        return torch.diag(penalty)


@dataclass(frozen=True, slots=True, eq=False)
class HeadMetric:
    """Metric of the lm_head as symmetric float64 matrices (hidden, hidden)."""

    root: Tensor  # M
    inverse: Tensor  # M^-1


@dataclass(frozen=True, slots=True, eq=False)
class SelectionTokens:
    """Tokens for choosing among maps. The normal equations don't include them."""

    normed: Tensor  # (m, hidden), states at the exit layer
    final: Tensor  # (m, hidden), after the last layer
    tokens: Tensor  # (m,), the full model's choice


def head_metric(head: Weight) -> HeadMetric:
    """Return the metric of an lm_head (vocab, hidden)."""
    n_tokens, hidden_size = head.shape
    gram, sums = (torch.zeros(*shape, dtype=torch.float64) for shape in ((hidden_size, hidden_size), (hidden_size,)))
    for first in range(0, n_tokens, METRIC_BLOCK_TOKENS):
        block = head.rows(torch.arange(first, min(n_tokens, first + METRIC_BLOCK_TOKENS))).double()
        gram.addmm_(block.T, block)
        sums += block.sum(0)
    gram -= torch.outer(sums, sums) / n_tokens
    values, vectors = torch.linalg.eigh(gram)
    floor = METRIC_FLOOR * float(values.clamp(min=0).mean()) or 1.0
    roots = values.clamp(min=floor).sqrt()
    return HeadMetric((vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T)


def fit_exit_map(
    equations: NormalEquations, metric: HeadMetric, chosen_by: SelectionTokens, lm_head: Callable[[Tensor], Tensor]
) -> ExitMap | None:
    """Return the largest map up to which each rank is right more often, or None if it is not clearly better than none.

    The map has fp16 values.

    Args:
        equations: Sums over the training tokens.
        metric: Metric of the lm_head.
        chosen_by: Tokens on which the ridge and the rank are chosen.
        lm_head: Maps normed states to logits.
    """
    if not equations.is_usable:
        return None
    ridge = min(RIDGES, key=lambda each: _error(equations.solution(each), metric, chosen_by))
    unmapped = _is_right(lm_head(chosen_by.normed), chosen_by)
    best, is_right = None, unmapped
    for candidate in _candidates(equations, metric, ridge):
        if candidate is None:
            continue
        found = _is_right(lm_head(candidate.apply(chosen_by.normed)), chosen_by)
        if best is not None and int(found.sum()) <= int(is_right.sum()) + WORTH_A_RANK * len(unmapped):
            break  # larger ones cost time here and at each exit
        best, is_right = candidate, found
    return best if best is not None and _is_better(is_right, unmapped) else None


def _is_right(logits: Tensor, rows: SelectionTokens) -> Tensor:
    return chosen_tokens(logits) == rows.tokens


def _is_better(mapped: Tensor, unmapped: Tensor) -> bool:
    """Return whether the map is right significantly more often, by McNemar's test on tokens that it changes."""
    gained, lost = int((mapped & ~unmapped).sum()), int((unmapped & ~mapped).sum())
    return gained - lost > SIGNIFICANT * math.sqrt(gained + lost)


def ranks(hidden_size: int) -> list[int]:
    """Return the ranks to try, in ascending order. The rank hidden_size means a full matrix."""
    if hidden_size > MAX_FULL_RANK_FEATURES:
        return [hidden_size // share for share in WIDE_RANK_SHARES]
    return [*sorted({max(1, hidden_size // share) for share in RANK_SHARES}), hidden_size]


def leading_vectors(symmetric: Tensor, n_vectors: int) -> Tensor:
    """Return eigenvectors (n, n_vectors) of the largest eigenvalues of a positive (n, n) matrix, largest first.

    They are exact for up to MAX_FULL_RANK_FEATURES. For larger matrices, subspace iteration from a fixed start is
    accurate enough for a map of reduced rank, while exact vectors of a 4096-wide matrix need minutes.
    """
    if len(symmetric) <= MAX_FULL_RANK_FEATURES:
        exact: Tensor = torch.linalg.eigh(symmetric)[1]
        return exact.flip(1)[:, :n_vectors]
    start = torch.Generator().manual_seed(0)
    basis = torch.randn(len(symmetric), 2 * n_vectors, dtype=symmetric.dtype, generator=start)
    for _ in range(SUBSPACE_STEPS):
        basis = torch.linalg.qr(symmetric @ basis)[0]
    within: Tensor = torch.linalg.eigh(basis.T @ symmetric @ basis)[1]
    return basis @ within.flip(1)[:, :n_vectors]


def _error(solution: Tensor, metric: HeadMetric, rows: SelectionTokens) -> float:
    """Return the squared error of a solution in the lm_head's metric."""
    residual = (rows.final - rows.normed).double() - rows.normed.double() @ solution[:-1] - solution[-1]
    return float((residual @ metric.root).square().sum())


def _candidates(equations: NormalEquations, metric: HeadMetric, ridge: float) -> Iterator[ExitMap | None]:
    """Yield a map for each rank, in ascending order, or None if fp16 can't represent it."""
    slope = equations.solution(ridge)[:-1]
    weighted = slope @ metric.root
    tried = ranks(len(slope))
    vectors = leading_vectors(weighted.T @ equations.energy(ridge) @ weighted, tried[-1])
    for rank in tried:
        try:
            yield _of_rank(equations, metric, slope, weighted, vectors[:, :rank]).rounded()
        except ValueError:
            yield None


def _of_rank(
    equations: NormalEquations, metric: HeadMetric, slope: Tensor, weighted: Tensor, vectors: Tensor
) -> ExitMap:
    if vectors.shape[1] == len(slope):
        return ExitMap(None, slope.T.float().contiguous(), equations.bias(slope).float())
    down, up = (weighted @ vectors).T, metric.inverse @ vectors
    balance = ((up.norm(dim=0) + 1e-300) / (down.norm(dim=1) + 1e-300)).sqrt()  # then both factors fit into fp16
    down, up = down * balance[:, None], up / balance
    return ExitMap(down.float().contiguous(), up.float().contiguous(), equations.bias(down.T @ up.T).float())
