"""Confidence: the chance that one row's likeliest candidate is right, from its logits and how they have changed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_ee.speculation.exits.candidates import N_CANDIDATES
from hetero_ee.speculation.exits.features import Floats, exit_features
from hetero_ee.speculation.exits.predictors import MlpPredictor, Predictor


class ExitConfidence:
    """A predictor's answers for single rows. predictor: that reads exit_features of N_CANDIDATES.

    compiled: by the CPU kernel where there is one for this kind of predictor, in microseconds; else by exit_features
    and the predictor itself, which agree with it to a few units of fp32's last place. NaN: the row can't be judged.
    """

    def __init__(self, predictor: Predictor, *, compiled: bool) -> None:
        self._predictor = predictor
        self._compiled = _kernel(predictor) if compiled and isinstance(predictor, MlpPredictor) else None

    def of_row(self, logits: Tensor, softmax: Floats | None = None) -> float:
        """logits (vocab,), fp32, on the CPU: the N_CANDIDATES greatest are looked at. softmax: see of_candidates; None
        where the row was not judged before. Raises ValueError for fewer tokens than candidates."""
        if len(logits) < N_CANDIDATES:
            raise ValueError(f"{len(logits)} logits, expected {N_CANDIDATES} at least.")
        softmax = np.zeros(N_CANDIDATES, np.float32) if softmax is None else softmax
        if self._compiled is not None:
            return self._compiled(logits.numpy(), softmax, True)
        return self._reference(torch.topk(logits, N_CANDIDATES).values.numpy(), softmax)

    def of_candidates(self, logits: Floats, softmax: Floats) -> float:
        """logits (k,) of the row's candidates, in their order; softmax (k,): theirs where the row was judged last,
        which becomes today's."""
        if self._compiled is not None:
            return self._compiled(logits, softmax, False)
        return self._reference(logits, softmax)

    def _reference(self, logits: Floats, softmax: Floats) -> float:
        return float(self._predictor.probability(exit_features(logits[None], softmax[None]))[0])


def _kernel(predictor: MlpPredictor) -> Callable[[Any, Floats, bool], float]:
    from hetero_ee_cpu_ops.exit_confidence import exit_confidence  # the kernels look where to be cached when imported

    network = predictor.network
    parts = np.ascontiguousarray(network.first.T), network.first_bias, network.second, network.second_bias
    nothing = np.zeros(predictor.n_features // 3, np.float32)
    exit_confidence(nothing, nothing.copy(), *parts, all_tokens=False)  # compiles it now and not within a text
    return lambda logits, softmax, all_tokens: exit_confidence(logits, softmax, *parts, all_tokens=all_tokens)
