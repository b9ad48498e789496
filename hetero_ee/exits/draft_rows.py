"""Drafts of a trace at a boundary: what a predictor sees of them, and whether they are the full model's tokens."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.exits.candidates import HeadCandidates
from hetero_ee.exits.exit_map import ExitMap
from hetero_ee.exits.features import exit_features
from hetero_ee.exits.traces import Trace, chosen_tokens
from hetero_ee.runtime.executor import Executor


@dataclass(frozen=True, slots=True, eq=False)
class DraftRows:
    """features: fp32 (m, 12), of the first layer evaluated for a row. is_right, is_right_unmapped: bool (m,), with the
    exit map and without."""

    features: NDArray[np.float32]
    is_right: NDArray[np.bool_]
    is_right_unmapped: NDArray[np.bool_]


def draft_rows(
    executor: Executor, found: Trace, boundary: int, exit_map: ExitMap | None, *, with_unmapped: bool
) -> DraftRows:
    """with_unmapped: computes is_right_unmapped too, one more product of the head; else it is False where a map is."""
    normed = found.at(boundary)
    candidates = HeadCandidates().of(executor.project(normed if exit_map is None else exit_map.apply(normed)))
    is_right = (candidates.token_ids[:, 0] == found.tokens.numpy()) & candidates.is_finite
    features = exit_features(candidates.logits, np.zeros_like(candidates.logits))
    if exit_map is None:
        return DraftRows(features, is_right, is_right)
    if not with_unmapped:
        return DraftRows(features, is_right, np.zeros_like(is_right))
    return DraftRows(features, is_right, _agrees(executor, normed, found.tokens))


def _agrees(executor: Executor, normed: Tensor, tokens: Tensor) -> NDArray[np.bool_]:
    agrees: NDArray[np.bool_] = (chosen_tokens(executor.project(normed)) == tokens).numpy()
    return agrees
