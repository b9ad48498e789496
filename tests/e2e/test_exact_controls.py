"""Negative controls: each defect of exact decoding, put in by hand, makes the identity check fail."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_ee import Engine
from hetero_ee.decoding import requests
from hetero_ee.decoding.sampling import choose_token
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.ops.torch_ops import TorchOps
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.speculation import drafts
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from tests.exact_cases import Case, Run, check_identity

EXIT_LAYER = 5
DRAFTING = Drafting(EXIT_LAYER, 5, FixedThreshold(0.0), DraftEnd())
N_TOKENS = 48
SAMPLED = Case(3, "demo", "none", False, "exit", 4, 0.5, "always", False, "top-p", 1, "length")


@pytest.fixture(scope="module")
def engine(demo: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(demo, quantizer="none", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def run(engine: Engine) -> Run:
    """A sampled text, in which drafts are right and wrong."""
    run = Run.of(SAMPLED, engine, N_TOKENS)
    return replace(run, params=run.params.changed(max_new_tokens=N_TOKENS))


class Later(ReferenceExecutor):
    """Does something before or after a pass of waiting tokens through the later layers."""

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor:
        if hidden is None or layers.start != EXIT_LAYER:
            return super().run(batch, hidden, layers)
        result = super().run(batch, self.before(hidden), layers)
        self.after(batch)
        return result

    def before(self, hidden: Tensor) -> Tensor:
        return hidden

    def after(self, batch: Batch) -> None: ...


class SwappedKv(Later):
    """The first two tokens of a step are exchanged in one layer's cache."""

    def after(self, batch: Batch) -> None:
        if len(batch) > 1:
            first = batch.positions[0]
            keys, values = (
                part.transpose(0, 1).flip(0).clone()
                for part in self.cache.read(EXIT_LAYER + 1, batch.sequences[0], first, first + 2)
            )
            two = Batch(batch.token_ids[:2], batch.sequences[:2], batch.positions[:2])
            self.cache.write(EXIT_LAYER + 1, two, keys, values)


class StaleState(Later):
    """The last token that waits has the state of the one that waited there in the step before."""

    stale: Tensor | None = None

    def before(self, hidden: Tensor) -> Tensor:
        last, self.stale = self.stale, hidden[-1:]
        return hidden if last is None or len(hidden) == 1 else torch.cat([hidden[:-1], last])


class ShiftedOps(TorchOps):
    """Turns keys and queries as of another position."""

    shift = 0

    def rope(self, x: Tensor, positions: tuple[int, ...], rope: Any, context_tokens: int) -> Tensor:
        return super().rope(x, tuple(position + self.shift for position in positions), rope, context_tokens)


class OffByOnePosition(Later):
    """Tokens that have waited are taken for one position later than they are."""

    def before(self, hidden: Tensor) -> Tensor:
        self._ops.shift = 1  # type: ignore[attr-defined]
        return hidden

    def after(self, batch: Batch) -> None:
        self._ops.shift = 0  # type: ignore[attr-defined]


class WrittenOnce(CpuKvCache):
    """What was written stays: nothing is rolled back but the lengths."""

    def __init__(self, *arguments: Any, kind: str) -> None:
        super().__init__(*arguments, kind=kind)
        self.written: set[tuple[int, int, int]] = set()

    def write(self, layer: int, batch: Batch, keys: Tensor, values: Tensor) -> None:
        for row, sequence, position in batch.entries():
            if (layer, sequence, position) not in self.written:
                self.written.add((layer, sequence, position))
                one = Batch.of_sequence(sequence, position, [batch.token_ids[row]])
                super().write(layer, one, keys[row : row + 1], values[row : row + 1])


class NeverTruncated(CpuKvCache):
    """truncate does nothing."""

    def truncate(self, sequence: int, length: int) -> int:
        return length


def executor(
    engine: Engine, kind: type[ReferenceExecutor] = ReferenceExecutor, cache: type[CpuKvCache] = CpuKvCache
) -> Executor:
    """Of the engine's weights, with a cache of its own; sound, unless made of what is not."""
    spec, n_tokens = engine.spec, engine.context_tokens
    ops = ShiftedOps() if kind is OffByOnePosition else TorchOps()
    held = cache(spec.n_layers, spec.n_kv_heads, spec.head_dim, n_tokens, kind=ReferenceExecutor.kv_type)
    return kind(spec, engine.executor.weights, n_tokens, ops, cache=held)


@pytest.mark.sample(0)
def test_without_a_defect_the_check_passes(engine: Engine, run: Run) -> None:
    counts = DraftCounts()
    for sound in (executor(engine), executor(engine, Later)):
        check_identity(run.full(), run.exact(DRAFTING, sound, counts))
    found = counts.statistics(engine.spec.n_layers, EXIT_LAYER)
    assert 0.1 < found.acceptance < 0.95 and found.accepted_runs[0] > 2  # right and wrong drafts both


@pytest.mark.parametrize("defect", [SwappedKv, StaleState, OffByOnePosition])
@pytest.mark.sample(1)
def test_a_defect_of_the_pass_is_found(engine: Engine, run: Run, defect: type[ReferenceExecutor]) -> None:
    said = run.exact(DRAFTING, executor(engine, defect))
    with pytest.raises(AssertionError):
        check_identity(run.full(), said)


@pytest.mark.sample(0)
def test_a_rollback_that_is_skipped_is_found(engine: Engine, run: Run) -> None:
    said = run.exact(DRAFTING, executor(engine, cache=WrittenOnce))
    with pytest.raises(AssertionError):
        check_identity(run.full(), said)
    with pytest.raises(ValueError, match="can't follow"):
        run.exact(DRAFTING, executor(engine, cache=NeverTruncated))


def of_the_next_position(logits: Any, history: Any, params: Any, sequence: int, position: int, **others: Any) -> int:
    return choose_token(logits, history, params, sequence, position + 1)


def drafted_of_the_next_position(sampler: Any, request: requests.Request, history: Any, logits: Any) -> int:
    return of_the_next_position(logits, history, request.params, request.index, len(history))


@pytest.mark.sample(0)
def test_noise_of_the_wrong_position_is_found(engine: Engine, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run.full()
    with monkeypatch.context() as patch:
        patch.setattr(requests, "choose_token", of_the_next_position)
        said = run.exact(DRAFTING)
    with pytest.raises(AssertionError):
        check_identity(expected, said)
    # A draft's noise decides how often it is right, and never what is said.
    right, wrong = DraftCounts(), DraftCounts()
    check_identity(expected, run.exact(DRAFTING, counts=right))
    monkeypatch.setattr(drafts.DraftSampler, "choose", drafted_of_the_next_position)
    check_identity(expected, run.exact(DRAFTING, counts=wrong))
    shares = [counts.statistics(engine.spec.n_layers, EXIT_LAYER).acceptance for counts in (right, wrong)]
    assert shares[1] < 0.8 * shares[0]
