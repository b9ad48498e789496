"""Plans with places drawn at random, for machines whose cards have room for all of them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import PlacedPart, Plan
from hetero_ee.planning.planner import plan
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.reference import reference_profile
from tests.shipped import MACHINES

MODELS = ("tinyllama-1.1b", "llama-2-7b", "llama-3-8b")
PLACES = ("gpu", "cpu", "stream")
CHUNKS = (16, 40, 128, 200, 512)
CONTEXT_TOKENS, WINDOW_TOKENS = 2048, 256


@dataclass(frozen=True, slots=True)
class Drawn:
    """limits: that pin the plan. name: for messages."""

    name: str
    spec: ModelSpec
    profile: HardwareProfile
    limits: Limits
    plan: Plan


def drawn(seed: int, kinds: Sequence[str] = PLACES) -> Drawn:
    """The plan of this seed: parts in places of these kinds; prompts in chunks of some size, and of the CPU's parts
    those visit that the planner chose, or some, or none."""
    rng = random.Random(seed)
    model, hardware = rng.choice(MODELS), rng.choice(MACHINES)
    spec, profile = known_spec(model), roomy(reference_profile(hardware))
    if rng.random() < 0.3:
        spec = replace(spec, sliding_windows=tuple(rng.choice([None, WINDOW_TOKENS]) for _ in range(spec.n_layers)))
    places = _places(rng, spec.n_layers, rng.sample(kinds, rng.randint(1, len(kinds))))
    names = [f"layers.{layer}.{kind}" for layer in range(spec.n_layers) for kind in ("attention", "ffn")]
    pins = tuple((name.replace(".", r"\."), place) for name, place in zip(names, places, strict=True))
    kv_type = rng.choice(["fp16", "int8", "fp32"])
    limits = Limits(context_tokens=CONTEXT_TOKENS, kv_type=kv_type, overrides=pins, mode="full")
    made = plan(spec, profile, limits)
    if any(part.decode_placement.on_gpu for part in made.parts):
        share = rng.choice([None, 0.0, 0.0, 0.7])
        made = made if share is None else replace(made, parts=tuple(_visiting(rng, made, share)))
    made = replace(made, prefill_chunk_tokens=rng.choice(CHUNKS))
    return Drawn(f"plan {seed}: {model} on {hardware}, {kv_type}", spec, profile, limits, made)


def roomy(profile: HardwareProfile) -> HardwareProfile:
    """The profile with a card that has room for everything."""
    assert profile.gpu is not None
    return replace(profile, gpu=replace(profile.gpu, free_bytes=64 * 2**30))


def _places(rng: random.Random, n_layers: int, kinds: Sequence[str]) -> list[str]:
    """In runs, in any order, layer by layer alike, or most of them streamed."""
    n_parts = 2 * n_layers
    match rng.choice(["runs", "any", "alike", "streamed"]):
        case "runs":
            cuts = sorted(rng.sample(range(1, n_parts), len(kinds) - 1))
            ends = zip([0, *cuts], [*cuts, n_parts], strict=True)
            return [kind for kind, (first, end) in zip(kinds, ends, strict=True) for _ in range(first, end)]
        case "any":
            return [rng.choice(kinds) for _ in range(n_parts)]
        case "alike":
            return [rng.choice(kinds), rng.choice(kinds)] * n_layers
    return ["stream" if "stream" in kinds and rng.random() < 0.8 else rng.choice(kinds) for _ in range(n_parts)]


def _visiting(rng: random.Random, made: Plan, share: float) -> list[PlacedPart]:
    """The parts, about this share of the CPU's visiting while a prompt is read."""
    return [
        replace(part, prefill_placement="visit" if rng.random() < share else "cpu")
        if part.layer is not None and part.decode_placement == "cpu"
        else part
        for part in made.parts
    ]
