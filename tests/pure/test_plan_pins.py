"""Plan -> the options that pin it -> the same plan: whatever was asked for, and however it was decided."""

from dataclasses import replace

import pytest

from hetero_ee.errors import UsageError
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.reports.pins import pins, placement_pins
from hetero_ee.planning.statistics import DraftRates, Statistics
from hetero_ee_cli.options.engine import ModelOptions
from hetero_ee_cli.options.placement import LimitOptions
from hetero_ee_profiles.reference import reference_profile
from hetero_ee_profiles.units import GIB
from tests.published_exits import published_statistics
from tests.shipped import MACHINES, SHAPES

DRAFTS = DraftRates("a source", (0.8, 0.7, 0.6), 1e-4)


def spec_of(name: str) -> ModelSpec:
    """Known shapes, or one with as many layers as models have today."""
    if name in SHAPES:
        return known_spec(name)
    small = known_spec("llama-3-8b")
    return replace(small, n_layers=80, sliding_windows=small.sliding_windows[:1] * 80)


def parsed(made: Plan, limits: Limits) -> Limits:
    """What the command line makes of the plan's options."""
    words = pins(made, limits)
    known = dict(words)

    def number(option: str) -> float | None:
        return float(known[option]) if option in known else None

    gpu_layers, draft_length = known.get("-ngl"), known.get("--draft-tokens")
    options = LimitOptions(
        vram_budget=number("--vram-budget"),
        ram_budget=number("--ram-budget"),
        gpu_layers=gpu_layers,
        override=[value for option, value in words if option == "-ot"] or None,
        kv_type=known["--kv-type"],
        mode=known["--mode"],
        draft_length=None if draft_length is None else int(draft_length),
    )
    assert len(words) == len(known) + max(0, len(options.given.get("override", ())) - 1)
    return options.limits(ModelOptions(context_tokens=int(known["-c"]), threads=int(known["-t"])))


PAIRS = [(model, card) for model in (*SHAPES, "80 layers") for card in MACHINES]
WISHES = {
    "nothing": Limits(),
    "a small budget": Limits(vram_budget_bytes=2 * GIB + 12345, context_tokens=2048),
    "half": Limits(vram_budget_bytes=5 * GIB // 2, kv_type="fp16", context_tokens=4000),
    "no GPU": Limits(gpu_layers=0, context_tokens=512),
    "layers": Limits(gpu_layers=3, context_tokens=1024, kv_type="int8"),
    "streams": Limits(overrides=((r"layers\.[4-7]\.ffn", "stream"),), vram_budget_bytes=3 * GIB, context_tokens=512),
    "the head alone": Limits(overrides=(("layers.*", "cpu"), ("head", "gpu")), context_tokens=512),
    "the head elsewhere": Limits(overrides=(("head", "cpu"),), vram_budget_bytes=3 * GIB, context_tokens=512),
    "little RAM": Limits(ram_budget_bytes=3 * GIB, vram_budget_bytes=2 * GIB, context_tokens=512),
    "exact": Limits(mode="exact", vram_budget_bytes=3 * GIB, context_tokens=512),
    "exact of three": Limits(mode="exact", draft_length=3, vram_budget_bytes=3 * GIB, context_tokens=1024),
}


@pytest.mark.parametrize(("model", "card"), PAIRS)
@pytest.mark.sample(1)
def test_the_options_of_a_plan_make_the_same_plan(model: str, card: str) -> None:
    spec, profile = spec_of(model), reference_profile(card)
    exits = published_statistics(spec.n_layers)
    known = (Statistics(), Statistics(exits), Statistics(exits, DRAFTS))
    n_made = 0
    for number, (wish, limits) in enumerate(WISHES.items(), PAIRS.index((model, card))):
        for statistics in known if wish == "nothing" else [known[number % 3]]:
            try:
                made = plan(spec, profile, limits, statistics)
            except UsageError:  # not every wish can be met everywhere
                continue
            again = plan(spec, profile, parsed(made, limits), statistics)
            assert again.sha256 == made.sha256, (wish, pins(made, limits))
            n_made += 1
    assert n_made > 5


def test_the_budget_of_snapshots_is_an_option_of_its_own() -> None:
    limits = Limits(context_tokens=512, snapshot_budget_bytes=GIB // 2)
    made = plan(known_spec("llama-2-7b"), reference_profile("rtx-4060-laptop-8gb"), limits)
    assert ("--snapshot-budget", "0.5") in pins(made, limits)
    assert not any(option == "--snapshot-budget" for option, _ in pins(made, Limits()))


def test_there_are_twenty_pairs() -> None:
    assert len(PAIRS) >= 20


def test_the_hash_is_of_decisions_alone() -> None:
    spec, profile = known_spec("llama-2-7b"), reference_profile("rtx-4060-laptop-8gb")
    made = plan(spec, profile, Limits(context_tokens=512))
    told = replace(made, reasons=("other words",), name="a name", hardware="another")
    assert replace(told, prediction=replace(made.prediction, first_token_s=1.0)).sha256 == made.sha256
    part = replace(made.parts[1], prefill_placement="visit", decode_placement="cpu")
    changes = [
        {"threads": 1},
        {"context_tokens": 511},
        {"kv_type": "int8"},
        {"prefill_chunk_tokens": 64},
        {"vram_budget_bytes": made.vram_budget_bytes + 1},
        {"ram_budget_bytes": made.ram_budget_bytes + 1},
        {"parts": (made.parts[0], part, *made.parts[2:])},
        {"shapes_sha256": "0"},
    ]
    assert len({replace(made, **change).sha256 for change in changes} | {made.sha256}) == len(changes) + 1


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((("layers.*", "gpu"),), [("-ngl", "32")]),
        (((r"layers\.(\d|1[01])\..*", "gpu"), ("layers.*", "cpu")), [("-ngl", "12")]),
        (((r".*attention", "gpu"), (".*ffn", "cpu")), [("-ot", ".*attention=gpu"), ("-ot", ".*ffn=cpu")]),
        (
            ((r"layers\.(\d|1[01])\..*", "gpu"), (r"layers\.12\.ffn", "gpu"), ("layers.*", "cpu")),
            [("-ngl", "12"), ("-ot", r"layers\.12\.ffn=gpu")],
        ),
        (
            ((r"layers\.[5-9]\..*", "gpu"), ("layers.*", "cpu")),
            [("-ot", r"layers\.[5-9]\..*=gpu"), ("-ot", "layers.*=cpu")],
        ),
    ],
)
def test_the_shortest_way_is_taken(overrides: tuple[tuple[str, str], ...], expected: list[tuple[str, str]]) -> None:
    limits = Limits(overrides=overrides, context_tokens=512)
    made = plan(known_spec("llama-2-7b"), reference_profile("rtx-3060-12gb"), limits)
    assert placement_pins(made.parts) == expected
