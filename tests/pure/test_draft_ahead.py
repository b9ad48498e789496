"""Rows drafted ahead, on a model whose answers are scripted: which begin, when, and which are kept."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hetero_ee.speculation.draft_gate import FixedGate
from hetero_ee.speculation.draft_pace import Pace
from torch import Tensor

from hetero_ee.decoding.full import generate
from hetero_ee.decoding.sampling import SamplingParams
from hetero_ee.decoding.texts import Ending
from hetero_ee.errors import DeviceMemoryError, UsageError
from hetero_ee.planning.times.overlap import Overlap, overlap
from hetero_ee.runtime.batch import Batch
from hetero_ee.speculation.drafting import Drafting, ExitHead
from hetero_ee.speculation.exact import generate_exact
from hetero_ee.speculation.statistics import DraftCounts
from tests.scripted_model import N_LAYERS, Next, ScriptedModel, successor, wrong_at

BOUNDARY, AHEAD, BEHIND = 2, 2, 4
PROMPT = [3, 4, 5]
SHUT, OPEN = FixedGate(2.0), FixedGate(0.0)


@dataclass
class Overlapping(ScriptedModel):
    """Notes the steps of a round: which layers which positions passed, and when all was brought to the CPU."""

    overlap: Overlap | None = field(default_factory=lambda: Overlap(AHEAD, BEHIND))
    steps: list[Any] = field(default_factory=list)

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor:
        self.steps.append((layers.start, layers.stop, batch.positions))
        return super().run(batch, hidden, layers)

    def on_cpu(self, hidden: Tensor) -> Tensor:
        self.steps.append("on cpu")
        return hidden


def drafting(gate: FixedGate = SHUT, draft_length: int = 2, exit_layer: int = BOUNDARY, **changes: Any) -> Drafting:
    return Drafting(exit_layer, draft_length, gate, **{"exit_head": ExitHead(), "drafts_ahead": True} | changes)


def generated(
    model: ScriptedModel, how: Drafting, n_tokens: int = 12, prompts: Any = (PROMPT,), **ending: Any
) -> DraftCounts:
    """In exact mode; the text must be that of full mode. What was counted."""
    end = Ending(ending.get("eos", frozenset()), ending.get("context_tokens", 200))
    found, counts = [], DraftCounts()
    arguments: Any = (list(prompts), SamplingParams(max_new_tokens=n_tokens), end, str, lambda: 0.0)
    sound: Any = ScriptedModel(model.full, model.full)
    for tokens in (generate(sound, *arguments), generate_exact(model, *arguments, how, counts)):  # type: ignore[arg-type]
        found.append(sorted((token.sequence, token.position, token.token_id) for token in tokens))
    assert found[0] == found[1] and model.cache.sequences == ()
    return counts


def test_the_waiting_rows_are_brought_first_then_the_guess_begins_then_the_cpu_goes_on() -> None:
    model = Overlapping(successor, successor)
    generated(model, drafting(), n_tokens=4)
    assert model.steps[1:] == [
        (0, 2, (3,)), (2, 4, (3,)), "on cpu", (0, 2, (4,)), (4, 6, (3,)),
        (2, 4, (4,)), "on cpu", (0, 2, (5,)), (4, 6, (4,)),
        (2, 6, (5,)),  # the text ends here: nothing follows
    ]  # fmt: skip


def test_a_guess_passes_as_many_layers_as_the_gpu_has() -> None:
    """The next round begins with what is left of its way to the exit layer."""
    model = Overlapping(successor, successor, overlap=Overlap(1, 3))
    generated(model, drafting(exit_layer=3), n_tokens=4)
    assert model.steps[2:6] == ["on cpu", (0, 1, (4,)), (3, 6, (3,)), (1, 3, (4,))]
    model = Overlapping(successor, successor, overlap=Overlap(3, 3))
    generated(model, drafting(exit_layer=3, layers_ahead=2), n_tokens=4)  # as far as the CPU's time allows
    assert model.steps[2:6] == ["on cpu", (0, 2, (4,)), (3, 6, (3,)), (2, 3, (4,))]
    model = Overlapping(successor, successor, overlap=Overlap(4, 4))
    generated(model, drafting(exit_layer=1), n_tokens=3)
    assert model.steps[1:6] == [(0, 1, (3,)), (1, 4, (3,)), "on cpu", (0, 1, (4,)), (4, 6, (3,))]


@pytest.mark.parametrize(
    ("exits", "gate", "n_ahead", "n_kept"),
    [
        (successor, SHUT, 10, 10),
        (wrong_at(5, 7), SHUT, 10, 8),
        (lambda token_id, _: token_id + 2, SHUT, 10, 0),
        (successor, OPEN, 5, 5),  # two rows a round
        (wrong_at(4), OPEN, 5, 4),  # a right draft, and a wrong guess behind it
        (wrong_at(3), OPEN, 5, 4),  # a wrong draft: no guess behind it counts
    ],
)
def test_right_guesses_are_kept_and_wrong_ones_rolled_back(
    exits: Next, gate: FixedGate, n_ahead: int, n_kept: int
) -> None:
    model = Overlapping(successor, exits)
    counts = generated(model, drafting(gate))
    assert (counts.n_ahead, counts.n_ahead_kept) == (n_ahead, n_kept)


def test_several_texts_begin_together_and_each_keeps_its_own() -> None:
    prompts = [PROMPT, [20, 21], [9]]
    model = Overlapping(successor, lambda token_id, _: token_id + (2 if 19 <= token_id < 30 else 1))
    counts = generated(model, drafting(), 8, prompts)
    launched = [step[2] for step, before in zip(model.steps[1:], model.steps, strict=False) if before == "on cpu"]
    assert [len(positions) for positions in launched] == [3] * 6
    assert (counts.n_ahead, counts.n_ahead_kept) == (18, 12)


@pytest.mark.parametrize("n_tokens", range(1, 8))
@pytest.mark.parametrize("gate", [SHUT, OPEN])
@pytest.mark.parametrize("kind", ["length", "context"])
def test_no_row_begins_that_the_text_can_not_hold(n_tokens: int, gate: FixedGate, kind: str) -> None:
    model = Overlapping(successor, wrong_at(6), max_tokens=len(PROMPT) + n_tokens)
    if kind == "length":
        generated(model, drafting(gate), n_tokens)
    else:
        generated(model, drafting(gate), 99, context_tokens=len(PROMPT) + n_tokens)
    positions = [position for step in model.steps if step != "on cpu" for position in step[2]]
    assert max(positions) < len(PROMPT) + n_tokens - 1 or n_tokens == 1


def test_a_text_that_ends_leaves_nothing_and_no_end_token_is_a_row() -> None:
    model = Overlapping(successor, successor)
    counts = generated(model, drafting(), prompts=[PROMPT, [12]], eos=frozenset({10}))
    assert not any(10 in one.rows.token_ids for one in model.passes if one.layers.start == 0)
    assert counts.n_ahead_kept > 0


class Unsound(Overlapping):
    """Every other position's logits at the exit layer are not finite."""

    def lm_head(self, normed: Tensor) -> Tensor:
        is_unsound = (normed[:, 2] == BOUNDARY) & (normed[:, 1] % 2 == 0)
        return super().lm_head(normed).masked_fill(is_unsound[:, None], float("nan"))


def test_logits_that_are_no_numbers_guess_nothing() -> None:
    counts = generated(Unsound(successor, successor), drafting())
    assert (counts.n_ahead, counts.n_ahead_kept) == (5, 5)


@dataclass
class NoRoom(Overlapping):
    """None when a guess begins, from the third time on."""

    error: Exception = field(default_factory=lambda: DeviceMemoryError("no room"))
    n_begun: int = 0

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor:
        if self.steps and self.steps[-1] == "on cpu":
            self.n_begun += 1
            if self.n_begun >= 3:
                self.steps.append("no room")
                raise self.error
        return super().run(batch, hidden, layers)


@pytest.mark.parametrize("error", [DeviceMemoryError("the GPU is full."), UsageError("other texts fill the cache.")])
def test_without_room_for_a_guess_the_text_goes_on_without_guesses(error: Exception) -> None:
    model = NoRoom(successor, successor, error=error)
    counts = generated(model, drafting())
    assert (counts.n_ahead, counts.n_ahead_kept) == (2, 2)
    assert model.n_begun == 3  # not asked for again


class Alternating(Pace):
    """Drafts every other round."""

    n_rounds = 0

    @property
    def drafts(self) -> bool:
        return self.n_rounds % 2 == 0

    def ended(self, seconds: float, n_tokens: int) -> None:
        self.n_rounds += 1


def test_a_round_without_drafts_begins_anew() -> None:
    model = Overlapping(successor, successor)
    counts = generated(model, drafting(pace=Alternating()))
    assert (counts.n_ahead, counts.n_ahead_kept) == (5, 5)
    assert [step for step in model.steps if step != "on cpu" and step[:2] == (0, 2)][:3] == [
        (0, 2, (3,)), (0, 2, (4,)), (0, 2, (4,)),
    ]  # fmt: skip


@pytest.mark.parametrize("change", [{"overlap": None}, {"drafts_ahead": False}, {"exit_layer": 0}])
def test_nothing_begins_where_nothing_would_run_at_the_same_time(change: dict[str, Any]) -> None:
    model = Overlapping(successor, successor, **{name: change[name] for name in change if name == "overlap"})
    how = drafting(**{name: value for name, value in change.items() if name != "overlap"})
    assert generated(model, how).n_ahead == 0
    assert "on cpu" not in model.steps


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
def test_the_overlap_of_places(layers: str, expected: Overlap | None) -> None:
    """g: the GPU; c: the CPU; s: streamed to the GPU; d: the disk, read by the CPU. Attention and FFN of each layer."""
    names = {"g": "gpu", "c": "cpu", "s": "stream", "d": "disk"}
    for head in ("gpu", "cpu"):
        assert overlap(["cpu", *(names[kind] for kind in layers.replace(" ", "")), head]) == expected


def test_layers_of_an_overlap_by_boundary() -> None:
    found = Overlap(ahead=2, behind=4)
    assert [found.layers_ahead(exit_layer) for exit_layer in (1, 2, 5)] == [1, 2, 2]
    assert [found.layers_behind(exit_layer) for exit_layer in (1, 4, 5)] == [4, 4, 5]
    assert N_LAYERS > 5
