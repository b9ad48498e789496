"""The exit predictor: estimates from a token's features how likely its best candidate is the full model's token.

A token whose features are not finite gets NaN. NaN reaches no threshold, so the token passes every layer. The last bits
of a probability may depend on the other tokens of the batch, because matrix products do. This can change which drafts
are made, but never which tokens are emitted.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_ee.speculation.exits.features import N_CANDIDATES, Floats, exit_features, is_finite


@dataclass(frozen=True, slots=True, eq=False)
class ExitPredictor:
    """SpecEE's network in fp32: n_features inputs, a ReLU layer, a sigmoid. Its layout is that of the GPU kernel
    `draft`."""

    first: Floats  # (h, n_features)
    first_bias: Floats  # (h,)
    second: Floats  # (h,)
    second_bias: Floats  # (1,)

    @property
    def parts(self) -> dict[str, Floats]:
        """Arrays of the network, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def probability(self, features: Floats) -> Floats:
        """Return probabilities (m,) from features (m, n_features) fp32, NaN for tokens with non-finite features."""
        n_features = self.first.shape[1]
        if features.ndim != 2 or features.shape[1] != n_features:
            raise ValueError(f"features of shape {features.shape}, expected (m, {n_features})")
        finite = is_finite(features)
        inner = np.maximum(features[finite] @ self.first.T + self.first_bias, 0)
        found = np.full(len(features), np.nan, np.float32)
        found[finite] = 0.5 * (1 + np.tanh(0.5 * (inner @ self.second + self.second_bias)))  # never overflows
        return found


class ExitConfidence:
    """Predictor of single tokens' confidence. A token that can't be judged gets NaN.

    Args:
        compiled: Whether to use the CPU kernel, which takes microseconds. Otherwise exit_features and the predictor
            compute the confidence in numpy; both agree to a few units in fp32's last place.
    """

    def __init__(self, predictor: ExitPredictor, *, compiled: bool) -> None:
        self._predictor = predictor
        self._compiled = _kernel(predictor) if compiled else None

    @property
    def network(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts = self._predictor.parts.values()
        first, first_bias, second, second_bias = (torch.from_numpy(np.ascontiguousarray(part)) for part in parts)
        return first, first_bias, second, second_bias

    def of_row(self, logits: Tensor, softmax: Floats | None = None) -> float:
        """Return the confidence from the N_CANDIDATES largest of a token's logits (vocab,), fp32 on the CPU.

        Args:
            softmax: See of_candidates; None the first time the token is judged.

        Raises: ValueError: if there are fewer tokens than candidates.
        """
        if len(logits) < N_CANDIDATES:
            raise ValueError(f"{len(logits)} logits, expected {N_CANDIDATES} at least.")
        softmax = np.zeros(N_CANDIDATES, np.float32) if softmax is None else softmax
        if self._compiled is not None:
            return self._compiled(logits.numpy(), softmax, True)
        return self._reference(torch.topk(logits, N_CANDIDATES).values.numpy(), softmax)

    def of_candidates(self, logits: Floats, softmax: Floats) -> float:
        """Return the confidence from logits (k,) of the candidates that an earlier exit layer chose, in their order.
        `softmax` (k,) is the candidates' softmax when the token was last judged, and is updated in place."""
        if self._compiled is not None:
            return self._compiled(logits, softmax, False)
        return self._reference(logits, softmax)

    def of_features(self, features: Floats) -> Floats:
        """Return the confidences (m,) from features (m, 12)."""
        return self._predictor.probability(features)

    def _reference(self, logits: Floats, softmax: Floats) -> float:
        return float(self._predictor.probability(exit_features(logits[None], softmax[None]))[0])


def _kernel(predictor: ExitPredictor) -> Callable[[Any, Floats, bool], float]:
    from hetero_ee_cpu_ops.exit_confidence import exit_confidence  # the kernels look where to be cached when imported

    parts = np.ascontiguousarray(predictor.first.T), predictor.first_bias, predictor.second, predictor.second_bias
    nothing = np.zeros(N_CANDIDATES, np.float32)
    exit_confidence(nothing, nothing.copy(), *parts, all_tokens=False)  # compiles it now and not within a text
    return lambda logits, softmax, all_tokens: exit_confidence(logits, softmax, *parts, all_tokens=all_tokens)
