"""Asynchronous drafting, on a model whose answers are scripted: which guesses begin, when, and which are kept."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from hetero_ee.errors import DeviceMemoryError, UsageError
from hetero_ee.kv.batch import Batch
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.times.overlap import Overlap, overlap
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.speed_switch import SpeculationSwitch
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from tests.scripted_model import (
    EXIT_LAYER,
    N_LAYERS,
    PROMPT,
    Next,
    ScriptedModel,
    decoding,
    drafted,
    successor,
    wrong_at,
)

AHEAD, BEHIND = 2, 4
NEVER, ALWAYS = FixedThreshold(2.0), FixedThreshold(0.0)


@dataclass
class Overlapping(ScriptedModel):
    """Notes the order of things: which layers which positions passed, and when all was brought to the CPU."""

    overlap: Overlap | None = field(default_factory=lambda: Overlap(AHEAD, BEHIND))
    log: list[Any] = field(default_factory=list)

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor:
        self.log.append((layers.start, layers.stop, batch.positions))
        return super().run(batch, hidden, layers)

    def on_cpu(self, hidden: Tensor) -> Tensor:
        self.log.append("on cpu")
        return hidden


def drafting(
    rule: FixedThreshold = NEVER, exit_layer: int = EXIT_LAYER, async_layers: int = N_LAYERS, **changes: Any
) -> Drafting:
    return Drafting(exit_layer, 2, rule, DraftEnd(), async_layers=async_layers, **changes)


def generated(
    model: ScriptedModel, how: Drafting, n_tokens: int | None = 12, prompts: Any = (PROMPT,), **ending: Any
) -> DraftCounts:
    """In exact mode; the text must be that of full mode. What was counted."""
    counts = DraftCounts()
    full = decoding(ScriptedModel(model.full, model.full), None, prompts, n_tokens, **ending)
    assert sorted(map(str, decoding(model, how, prompts, n_tokens, counts, **ending))) == sorted(map(str, full))
    assert model.cache.sequences == ()
    return counts


def test_waiting_tokens_move_first_then_the_guess_begins_then_the_cpu_verifies() -> None:
    model = Overlapping(successor, successor)
    generated(model, drafting(), n_tokens=4)
    assert model.log[1:] == [
        (0, 2, (3,)), (2, 4, (3,)), "on cpu", (0, 2, (4,)), (4, 6, (3,)),
        (2, 4, (4,)), "on cpu", (0, 2, (5,)), (4, 6, (4,)),
        (2, 6, (5,)),  # the text ends here: nothing follows
    ]  # fmt: skip


def test_a_guess_passes_as_many_layers_as_the_gpu_has() -> None:
    """The next step begins with what is left of its way to the exit layer."""
    model = Overlapping(successor, successor, overlap=Overlap(1, 3))
    generated(model, drafting(exit_layer=3), n_tokens=4)
    assert model.log[2:6] == ["on cpu", (0, 1, (4,)), (3, 6, (3,)), (1, 3, (4,))]
    model = Overlapping(successor, successor, overlap=Overlap(3, 3))
    generated(model, drafting(exit_layer=3, async_layers=2), n_tokens=4)  # as far as the CPU's time allows
    assert model.log[2:6] == ["on cpu", (0, 2, (4,)), (3, 6, (3,)), (2, 3, (4,))]
    model = Overlapping(successor, successor, overlap=Overlap(4, 4))
    generated(model, drafting(exit_layer=1), n_tokens=3)
    assert model.log[1:6] == [(0, 1, (3,)), (1, 4, (3,)), "on cpu", (0, 1, (4,)), (4, 6, (3,))]


@pytest.mark.parametrize(
    ("exits", "rule", "n_ahead", "n_kept"),
    [
        (successor, NEVER, 10, 10),
        (wrong_at(5, 7), NEVER, 10, 8),
        (lambda token_id, _: token_id + 2, NEVER, 10, 0),
        (successor, ALWAYS, 5, 5),  # two tokens a step
        (wrong_at(4), ALWAYS, 5, 4),  # a right draft, and a wrong guess after it
        (wrong_at(3), ALWAYS, 5, 4),  # a wrong draft: no guess after it counts
    ],
)
def test_right_guesses_are_kept_and_wrong_ones_rolled_back(
    exits: Next, rule: FixedThreshold, n_ahead: int, n_kept: int
) -> None:
    model = Overlapping(successor, exits)
    counts = generated(model, drafting(rule))
    assert (counts.n_ahead, counts.n_ahead_kept) == (n_ahead, n_kept)


def test_several_texts_begin_together_and_each_keeps_its_own() -> None:
    prompts = [PROMPT, [20, 21], [9]]
    model = Overlapping(successor, lambda token_id, _: token_id + (2 if 19 <= token_id < 30 else 1))
    counts = generated(model, drafting(), 8, prompts)
    begun = [entry[2] for entry, before in zip(model.log[1:], model.log, strict=False) if before == "on cpu"]
    assert [len(positions) for positions in begun] == [3] * 6
    assert (counts.n_ahead, counts.n_ahead_kept) == (18, 12)


@pytest.mark.parametrize("n_tokens", range(1, 8))
@pytest.mark.parametrize("rule", [NEVER, ALWAYS])
@pytest.mark.parametrize("kind", ["length", "context"])
def test_no_guess_begins_that_the_text_can_not_hold(n_tokens: int, rule: FixedThreshold, kind: str) -> None:
    model = Overlapping(successor, wrong_at(6), max_tokens=len(PROMPT) + n_tokens)
    if kind == "length":
        generated(model, drafting(rule), n_tokens)
    else:
        generated(model, drafting(rule), None, context_tokens=len(PROMPT) + n_tokens)
    positions = [position for entry in model.log if entry != "on cpu" for position in entry[2]]
    assert max(positions) < len(PROMPT) + n_tokens - 1 or n_tokens == 1


def test_a_text_that_ends_leaves_nothing_and_no_end_token_is_guessed() -> None:
    model = Overlapping(successor, successor)
    counts = generated(model, drafting(), prompts=[PROMPT, [12]], eos=frozenset({10}))
    assert not any(10 in one.batch.token_ids for one in model.passes if one.layers.start == 0)
    assert counts.n_ahead_kept > 0


class Unsound(Overlapping):
    """Every other position's logits at the exit layer are not finite."""

    def lm_head(self, normed: Tensor) -> Tensor:
        is_unsound = (normed[:, 2] == EXIT_LAYER) & (normed[:, 1] % 2 == 0)
        return super().lm_head(normed).masked_fill(is_unsound[:, None], float("nan"))


def test_logits_that_are_not_finite_guess_nothing() -> None:
    counts = generated(Unsound(successor, successor), drafting())
    assert (counts.n_ahead, counts.n_ahead_kept) == (5, 5)


@dataclass
class NoRoom(Overlapping):
    """None when a guess begins, from the third time on."""

    error: Exception = field(default_factory=lambda: DeviceMemoryError("no room"))
    n_begun: int = 0

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor:
        if self.log and self.log[-1] == "on cpu":
            self.n_begun += 1
            if self.n_begun >= 3:
                self.log.append("no room")
                raise self.error
        return super().run(batch, hidden, layers)


@pytest.mark.parametrize("error", [DeviceMemoryError("the GPU is full."), UsageError("other texts fill the cache.")])
def test_without_room_for_a_guess_the_text_goes_on_without(error: Exception) -> None:
    model = NoRoom(successor, successor, error=error)
    counts = generated(model, drafting())
    assert (counts.n_ahead, counts.n_ahead_kept) == (2, 2)
    assert model.n_begun == 3  # not asked for again


class Alternating(SpeculationSwitch):
    """Drafts every other step."""

    def ended(self, seconds: float, n_tokens: int) -> None:
        self.drafts = not self.drafts


def test_a_step_without_drafts_drops_the_guess() -> None:
    model = Overlapping(successor, successor)
    counts = generated(model, drafting(switch=Alternating()))
    assert (counts.n_ahead, counts.n_ahead_kept) == (5, 5)
    begun = [entry for entry in model.log[1:] if entry != "on cpu" and entry[0] == 0]
    assert begun[:3] == [(0, 2, (3,)), (0, 2, (4,)), (0, 6, (4,))]


@pytest.mark.parametrize("async_layers", [0, N_LAYERS])
def test_nothing_begins_where_nothing_would_run_at_the_same_time(async_layers: int) -> None:
    model = Overlapping(successor, successor, overlap=None if async_layers else Overlap(AHEAD, BEHIND))
    assert generated(model, drafting(async_layers=async_layers)).n_ahead == 0
    sequences = Overlapping(successor, successor)
    _, how = drafted("sequences", async_layers=async_layers)
    assert generated(sequences, how).n_ahead == 0
    assert "on cpu" not in model.log and "on cpu" not in sequences.log


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("gg gg cc cc", Overlap(2, 2)),
        ("gg gc cg cc", Overlap(1, 3)),
        ("gg ss cc dd", Overlap(1, 2)),
        ("gg gg gg gg", None),
        ("cc cc cc cc", None),
        ("cc gg cc cc", None),
        ("gg cc cc gg", None),
        ("gg cc cc cs", None),
    ],
)
def test_the_overlap_of_devices(layers: str, expected: Overlap | None) -> None:
    """g: the GPU; c: the CPU; s: streamed to the GPU; d: the disk, read by the CPU. Attention and FFN of each layer."""
    names = {"g": "gpu", "c": "cpu", "s": "stream", "d": "disk"}
    assert overlap([{Placement(names[kind]) for kind in layer} for layer in layers.split()]) == expected


def test_layers_of_an_overlap_by_exit_layer() -> None:
    found = Overlap(ahead=2, behind=4)
    assert [found.layers_ahead(exit_layer) for exit_layer in (1, 2, 5)] == [1, 2, 2]
    assert [found.layers_behind(exit_layer) for exit_layer in (1, 4, 5)] == [4, 4, 5]
