"""Drafts of a trace at every exit_layer: what a predictor sees of them, and whether they are the full model's
tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.calibration.traces import Trace, chosen_tokens
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.candidates import HeadCandidates
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.exits.sliced_logits import SlicedLogits, rank_of


@dataclass(frozen=True, slots=True, eq=False)
class DraftRows:
    """is_right, is_right_unmapped: bool (n_exit_layers, m), with the exit maps and without. sliced: the candidates that
    each exit layer takes, there and at all later ones."""

    is_right: NDArray[np.bool_]
    is_right_unmapped: NDArray[np.bool_]
    sliced: SlicedLogits

    @property
    def features(self) -> NDArray[np.float32]:
        """fp32 (n_exit_layers, m, 12), each exit layer being the first evaluated."""
        places = range(1, self.sliced.n_exit_layers + 1)
        return np.stack([self.sliced.features(exit_layer, exit_layer, None) for exit_layer in places])


def draft_rows(executor: Executor, found: Trace, maps: Mapping[int, ExitMap], *, with_unmapped: bool) -> DraftRows:
    """with_unmapped: computes is_right_unmapped too, one more product of the head where a map is; else it is False
    there. Memory holds the whole vocabulary's logits of one exit layer at a time."""
    tokens = found.tokens.numpy()
    taken: list[NDArray[np.int64]] = []
    logits, rank, is_right, is_right_unmapped = [], [], [], []
    for exit_layer, normed in enumerate(found.normed, start=1):
        exit_map = maps.get(exit_layer)
        whole = executor.lm_head(normed if exit_map is None else exit_map.apply(normed))
        candidates = HeadCandidates().of(whole)
        taken.append(candidates.token_ids)
        logits += [np.take_along_axis(whole.numpy(force=True), token_ids, axis=1) for token_ids in taken]
        rank.append(rank_of(tokens, candidates.token_ids))
        is_right.append((candidates.token_ids[:, 0] == tokens) & candidates.is_finite)
        if exit_map is None:
            is_right_unmapped.append(is_right[-1])
        else:
            is_right_unmapped.append(_agrees(executor, normed, found.tokens) & with_unmapped)
    sliced = SlicedLogits(np.stack(logits), np.stack(rank))
    return DraftRows(np.stack(is_right), np.stack(is_right_unmapped), sliced)


def _agrees(executor: Executor, normed: Tensor, tokens: Tensor) -> NDArray[np.bool_]:
    agrees: NDArray[np.bool_] = (chosen_tokens(executor.lm_head(normed)) == tokens).numpy()
    return agrees
