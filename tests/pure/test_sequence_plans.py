"""Plans for several open sequences, a server's: each has its own recurrent state and sliding windows, and the GPU's
caches have room for them from the start."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.errors import UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.cache import LayeredCache
from hetero_ee.kv.gpu import GpuKvCache
from hetero_ee.layers.state import KvState, RecurrentState, kept_tokens
from hetero_ee.models.blocks import layer_states
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.parts import model_parts
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import check_fits
from hetero_ee.planning.request import PlanRequest
from hetero_ee.planning.statistics import Statistics
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.serving.settings import N_EXPRESS, ServerSettings
from hetero_ee.speculation.sources.draft_model_opening import DraftModel
from hetero_ee_profiles.records import to_json
from hetero_ee_profiles.reference import reference_profile
from tests.emulation import LAPTOP, planned
from tests.executor_support import model_of
from tests.placements import ALL_CPU, ALL_GPU
from tests.stand_in_machine import on_stand_in

HYBRID = read_spec(Path(__file__).parent.parent / "assets" / "hybrid")
N_SEQUENCES, CONTEXT_TOKENS = 4, 4096
# States of more than the megabytes to which plans round up each layer.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "recurrent": (
        "qwen3.5",
        {"linear_num_key_heads": 4, "linear_num_value_heads": 40, "linear_key_head_dim": 128}
        | {"linear_value_head_dim": 128, "max_position_embeddings": CONTEXT_TOKENS},
    ),
    "windowed": ("mistral", {"head_dim": 500, "max_position_embeddings": CONTEXT_TOKENS}),
}


def plan_of(spec: ModelSpec, n_sequences: int, **limits: Any) -> Plan:
    return planned(spec, **{"n_sequences": n_sequences, "context_tokens": CONTEXT_TOKENS, "mode": "full"} | limits)


def state_bytes(made: Plan, device: str) -> int:
    return sum(
        term.n_bytes for term in made.memory if term.name.startswith("keys and values") and term.device == device
    )


def test_states_count_for_each_sequence_and_keys_and_values_for_all_together() -> None:
    one, four = (plan_of(HYBRID, n, overrides=ALL_CPU) for n in (1, N_SEQUENCES))
    growth = {
        part.layer: (part.kv_bytes, more.kv_bytes)
        for part, more in zip(one.parts, four.parts, strict=True)
        if part.kv_bytes
    }
    states = layer_states(HYBRID)
    assert {type(states[layer or 0]) for layer in growth} == {KvState, RecurrentState}
    for layer, (before, after) in growth.items():
        assert after == before * (N_SEQUENCES if isinstance(states[layer or 0], RecurrentState) else 1)
    assert state_bytes(four, "cpu") == sum(after for _, after in growth.values())


def test_windows_count_for_each_sequence_up_to_the_context() -> None:
    llama = known_spec("llama-3.1-8b")
    spec = replace(llama, sliding_windows=(512,) * llama.n_layers)
    (first, *_) = [part for part in model_parts(spec, "fp16") if part.label == "attention"]
    alone = first.kv_bytes(CONTEXT_TOKENS)
    assert first.kv_bytes(CONTEXT_TOKENS, 3) == 3 * alone
    assert first.kv_bytes(CONTEXT_TOKENS, 30) == alone * CONTEXT_TOKENS // kept_tokens(CONTEXT_TOKENS, 512)
    state, sizes = first.cost.state, (2**16, "fp16", 2048)  # a prompt's chunk is larger than usual
    assert state is not None and state.pass_bytes(*sizes, 3) == 3 * state.pass_bytes(*sizes) > 0


@pytest.mark.parametrize("kind", MODELS)
def test_a_plan_has_room_for_the_states_of_all_sequences(kind: str, tmp_path: Path) -> None:
    """On the stand-in GPU. A plan for one sequence, where the caches have to grow, shows that the test would see it."""
    family, changes = MODELS[kind]
    model = model_of(family, "int4", tmp_path, **changes)
    for n_planned in (N_SEQUENCES, 1):
        made = plan_of(model[0], n_planned, overrides=ALL_GPU, kv_type="fp32")
        executor = on_stand_in(*model, made)
        caches = executor.cache.parts
        at_first = [cache.n_bytes for cache in caches]
        fill(executor, caches)
        fits = sum(cache.n_bytes for cache in caches) <= state_bytes(made, "gpu")
        has_grown = [cache.n_bytes for cache in caches] != at_first
        executor.close()
        assert (fits, has_grown) == ((True, False) if n_planned == N_SEQUENCES else (False, True))


def fill(executor: Executor, caches: tuple[LayeredCache[Any], ...]) -> None:
    """Open the sequences and let their windows hold as much as they can."""
    for sequence in [executor.cache.open_new() for _ in range(N_SEQUENCES)]:
        for cache in caches:
            if isinstance(cache, GpuKvCache) and cache.window is not None:
                cache.adopt(sequence, 0, kept_tokens(CONTEXT_TOKENS, cache.window))


def test_a_draft_model_has_a_state_for_each_sequence() -> None:
    drafts: Any = DraftModel("small", HYBRID, None, None)  # type: ignore[arg-type]
    sizes = [drafts.memory_bytes(CONTEXT_TOKENS, n, on_gpu=False) for n in (1, 2, 3)]
    assert sizes[0] < sizes[1] and sizes[2] - sizes[1] == sizes[1] - sizes[0]


def test_a_server_asks_for_its_slots() -> None:
    asked = ServerSettings(n_slots=4).n_sequences
    assert asked == 4 + N_EXPRESS
    request = PlanRequest.of({"profile": reference_profile(LAPTOP), "n_sequences": asked})
    assert request.limited_by is None and request.limits.n_sequences != asked
    completed = request.completed(reference_profile(LAPTOP), "codebook", Statistics())
    assert completed.limits.n_sequences == asked
    given = replace(request, n_sequences=None, limits=Limits(n_sequences=3))
    assert given.completed(reference_profile(LAPTOP), "codebook", Statistics()).limits.n_sequences == 3
    with pytest.raises(UsageError, match="n_sequences is 66; expected a whole number from 1 to 65"):
        PlanRequest.of({"n_sequences": 66})


def test_plans_say_for_how_many_sequences_they_are(tmp_path: Path) -> None:
    one, four = (plan_of(HYBRID, n, overrides=ALL_CPU) for n in (1, N_SEQUENCES))
    four.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read == four and read.sha256 != one.sha256
    check_fits(read, HYBRID)
    with pytest.raises(UsageError, match="bytes of weights and KV cache of"):
        check_fits(replace(read, n_sequences=1), HYBRID)


def test_a_plan_from_before_sequences_were_counted_is_for_one(tmp_path: Path) -> None:
    sealed = plan_of(HYBRID, 1, overrides=ALL_CPU).sealed
    body = json.loads(to_json(sealed))
    del body["n_sequences"]
    (tmp_path / "plan.json").write_text(json.dumps(body))
    read = Plan.load(tmp_path / "plan.json")
    assert read.n_sequences == 1 and read.checksum == sealed.checksum == read.sealed.checksum
