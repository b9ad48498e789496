"""Passes through parts whose times are whole numbers: what overlaps and what waits, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from hetero_ee.models.known_shapes import known_spec
from hetero_ee.planning.parts import Part, model_parts
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.times.costs import reads_on_cpu
from hetero_ee.planning.times.lanes import Lanes, pass_time
from hetero_ee.planning.times.prompts import Placements, prompt_s

CROSSING_S, COPY_S, BESIDE_S = 1.0, 10.0, 12.0
SECONDS = {Placement.CPU: 8.0, Placement.GPU: 2.0, Placement.STREAM: 2.0, Placement.VISIT: 2.0}
EVERY = model_parts(known_spec("tinyllama-1.1b"), "fp16")
PARTS = [EVERY[0], *EVERY[1:7], EVERY[-1]]  # three layers


class RoundFigures:
    """A part of a layer takes SECONDS, embedding and head nothing."""

    profile = SimpleNamespace(link=object())

    def part_s(self, part: Part, place: Placement, m: int, context_tokens: int) -> float:
        return 0.0 if part.layer is None else SECONDS[place]

    def copy_s(
        self, part: Part, place: Placement = Placement.STREAM, context_tokens: int = 0, *, beside_cpu: bool = False
    ) -> float:
        return BESIDE_S if beside_cpu else COPY_S

    def transfer_s(self, m: int) -> float:
        return CROSSING_S

    logits_transfer_s = transfer_s


COSTS: Any = RoundFigures()


def placed(layers: str) -> list[Placement]:
    letters = {"c": Placement.CPU, "g": Placement.GPU, "s": Placement.STREAM}
    head = Placement.CPU if set(layers) == {"c"} else Placement.GPU
    return [Placement.CPU, *(letters[letter] for letter in layers), head]


@pytest.mark.parametrize(
    "layers, first_s, steady_s",
    [
        ("cccccc", 48, 48),
        ("gggggg", 14, 14),  # there and back are 2
        ("ggcccc", 40, 40),
        ("gcgcgc", 38, 38),  # 24 + 6, and 8 transfers
        ("ssssss", 63, 60),  # the link never rests: 6 copies
        ("gggggs", 14, 14),  # the copy ends at 10, just before the part is reached
        ("sggggg", 23, 14),  # the only copy has run under the pass before
        ("ssgggg", 31, 20),  # two copies a pass
        ("sccccc", 57, 46),  # 12 beside the CPU + 2 + 1 + 40 + 1 + 1; then 1 in place of the copy's 12
        ("ccccss", 38, 38),
    ],
)
def test_passes_one_after_the_other(layers: str, first_s: float, steady_s: float) -> None:
    places = placed(layers)
    lanes = Lanes(COSTS, beside_cpu=reads_on_cpu(PARTS, places))
    lanes.whole_pass(PARTS, places, 1, 1)
    assert (lanes.spent.seconds, pass_time(COSTS, PARTS, places, 1, 1).seconds) == (first_s, steady_s)


@pytest.mark.parametrize(
    "layers, seconds",
    [
        ("cccccc", 96),
        ("gggggg", 27),  # the second chunk crosses when the GPU is free
        ("ggcccc", 73),  # its first layer is computed under the CPU's later ones: 5 less than alternately
        ("sccccs", 90),  # copies come in order, so that the second chunk waits for its turn
        ("ssssss", 123),
    ],
)
def test_a_prompt_in_two_chunks(layers: str, seconds: float) -> None:
    places = placed(layers)
    assert prompt_s(COSTS, PARTS, Placements(places, places), 64, 32) == seconds


def test_a_short_last_chunk_takes_the_way_of_decoding() -> None:
    """Sixteen tokens and fewer; what was copied ahead for other placements is of no use and still takes its time."""
    streamed, resident = placed("ssgggg"), placed("gggggg")
    assert prompt_s(COSTS, PARTS, Placements(streamed, resident), 32 + 16, 32) == 30 + 13 + 1
    other = placed("ggggss")
    assert prompt_s(COSTS, PARTS, Placements(streamed, other), 32 + 16, 32) == 40 + 10 + 10 + 2 + 1
