"""Merged mapping: each path of a draft tree is judged once, as its weakest node is."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.speculation.exits.features import exit_features
from hetero_ee.speculation.exits.merged_mapping import path_confidences
from hetero_ee.speculation.exits.predictor import ExitConfidence, ExitPredictor


def judge_of(seed: int) -> tuple[ExitConfidence, list[int]]:
    """A judge of random numbers, and how many paths each call judged."""
    random, calls = np.random.default_rng(seed), list[int]()
    shapes = (7, 12), 7, 7, 1
    judge = ExitConfidence(ExitPredictor(*(random.normal(size=shape).astype(np.float32) for shape in shapes)))
    known = judge.of_features

    def counted(features: np.ndarray) -> np.ndarray:
        calls.append(len(features))
        return known(features)

    judge.of_features = counted  # type: ignore[method-assign]
    return judge, calls


@pytest.mark.parametrize("seed", range(4))
def test_each_path_is_judged_once_by_its_weakest_node(seed: int) -> None:
    random = np.random.default_rng(seed)
    n_nodes, n_paths = int(random.integers(1, 9)), int(random.integers(1, 12))
    logits = random.normal(0, 2, (n_nodes, 4)).astype(np.float32)
    candidates = torch.from_numpy(random.integers(0, 50, (n_nodes, 4)))
    hidden = torch.randn(n_nodes, 8)
    asked: list[tuple[Tensor, Tensor]] = []

    def partial_logits(states: Tensor, ids: Tensor, end: DraftEnd) -> Tensor:
        asked.append((states, ids))
        return torch.from_numpy(logits)

    executor: Any = SimpleNamespace(partial_logits=partial_logits)
    judge, calls = judge_of(seed)
    paths = [
        [(int(random.integers(n_nodes)), int(random.integers(4))) for _ in range(int(random.integers(1, 5)))]
        for _ in range(n_paths)
    ]
    found = path_confidences(executor, DraftEnd(), judge, hidden, candidates, paths)
    assert calls == [n_paths] and len(asked) == 1 and asked[0][0] is hidden and asked[0][1] is candidates
    for path, confidence in zip(paths, found, strict=True):
        shares = [torch.softmax(torch.from_numpy(logits[node]), 0) for node, _ in path]
        weakest = min(range(len(path)), key=lambda step: float(shares[step][path[step][1]]))
        node, rank = path[weakest]
        alone = judge._predictor.probability(exit_features(logits[node][None], np.zeros((1, 4), np.float32)))
        expected = alone[0] * float(shares[weakest][rank] / shares[weakest].max())
        assert confidence == pytest.approx(expected, rel=1e-4)


def test_logits_that_mean_nothing_give_no_confidence() -> None:
    executor: Any = SimpleNamespace(partial_logits=lambda *_: torch.tensor([[1.0, float("nan"), 0.0, 0.0]]))
    judge, _ = judge_of(0)
    found = path_confidences(executor, DraftEnd(), judge, torch.zeros(1, 8), torch.zeros(1, 4).long(), [[(0, 0)]])
    assert np.isnan(found).all()
