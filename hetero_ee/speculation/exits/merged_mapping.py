"""Merged mapping: judges each root-to-leaf path of a draft tree once, as one hyper-token.

Paths share nodes, so judging every node of every path would repeat work. Here one call computes the candidates' logits
after all nodes, and a predictor judges each path once, by the features of its weakest node: where the path's own child
has the smallest softmax. So evaluations grow with the number of paths, and logits with the number of nodes. Source:
SpecEE (arXiv 2504.08850), section 6, which does not say how the features of a path's nodes are merged.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.features import N_CANDIDATES, Floats, exit_features
from hetero_ee.speculation.exits.predictor import ExitConfidence

Path = Sequence[tuple[int, int]]  # the node and the rank of the path's child among its candidates, from the root on


def path_confidences(
    executor: Executor, end: DraftEnd, judge: ExitConfidence, hidden: Tensor, candidates: Tensor, paths: Sequence[Path]
) -> Floats:
    """Return the confidence (n_paths,) that each path is right, NaN for one whose logits are not finite.

    It is the predictor's confidence at the weakest node, times the softmax of the path's child there relative to the
    likeliest candidate's.

    Args:
        end: Of the exit layer that the nodes have passed.
        judge: Of that exit layer, for candidates of a draft.
        hidden: (n_nodes, hidden), the nodes' states.
        candidates: (n_nodes, 4) int64, the draft's likeliest tokens after each node, best first.
        paths: At least one node each. Leaves are left out, because nothing follows them.
    """
    logits = executor.partial_logits(hidden, candidates, end).numpy(force=True)
    softmax = np.zeros((len(logits), N_CANDIDATES), np.float32)
    features = exit_features(logits, softmax)
    shares = softmax / softmax.max(axis=1, keepdims=True)
    weakest = [min(path, key=lambda step: softmax[step]) for path in paths]
    nodes, ranks = (list(column) for column in zip(*weakest, strict=True))
    return np.asarray(judge.of_features(features[nodes]) * shares[nodes, ranks])
