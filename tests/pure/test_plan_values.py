"""Limits and plans hold only values that make sense together: everything else is refused in a sentence."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_ee.errors import UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.options.engine import EARLY_EXIT_MODES, RISK
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import EXIT, SEQUENCE, Plan
from hetero_ee.planning.planner import check_fits, shapes_sha256
from hetero_ee.planning.reports.pins import pins
from hetero_ee.runtime.devices.timeline import Timeline
from hetero_ee_profiles.records import to_json
from hetero_ee_profiles.reference import reference_profile
from tests.emulation import LAPTOP, dummy, planned

SPEC = read_spec(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 61,
        "max_position_embeddings": 64,
    }
)
PINS = ((r"layers\.0\..*", "gpu"), (r"layers\.1\..*", "stream"), (r"layers\.2\..*", "cpu"))
GOOD = planned(SPEC, overrides=PINS, context_tokens=64, mode="full")
HUGE = 10**30

BAD_LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "draft tokens as text": ({"draft_length": "3"}, r"draft_length is '3'; expected a whole number from 1 to 16"),
    "draft tokens as truth": ({"draft_length": True}, r"draft_length is True; expected a whole number from 1 to 16"),
    "no overrides": ({"overrides": None}, r"overrides is None; expected a tuple"),
    "overrides as text": ({"overrides": "a=gpu"}, r"overrides is 'a=gpu'; expected a tuple"),
    "a number as pattern": ({"overrides": ((1, "gpu"),)}, r"override \(1, 'gpu'\) is not a pair"),
    "three in a pair": ({"overrides": (("a", "b", "gpu"),)}, "not a pair"),
    "an override as text": ({"overrides": ("a=gpu",)}, "not a pair"),
    "a place as a list": ({"overrides": (("a", []),)}, "not a pair"),
    "a list as kv type": ({"kv_type": []}, r"kv_type is \[\]; expected one of fp32"),
    "no sequences": ({"n_sequences": 0}, r"n_sequences is 0; expected a whole number from 1 to 65"),
    "a list as mode": ({"mode": []}, r"mode is \[\]; expected one of full"),
    "threads below 0": ({"threads": -1}, r"threads is -1; .* to 1024"),
    "threads as text": ({"threads": "x"}, r"threads is 'x'; expected a whole number"),
    "too many threads": ({"threads": 1025}, "threads is 1025"),
    "no threads": ({"threads": None}, "threads is None"),
    "no margin": ({"vram_margin_bytes": None}, "vram_margin_bytes is None"),
    "half a byte": ({"vram_margin_bytes": 0.5}, "vram_margin_bytes is 0.5"),
    "no context": ({"context_tokens": None}, "context_tokens is None"),
    "too long a context": ({"context_tokens": 2**24 + 1}, r"context_tokens is 16777217; .* to 16777216"),
    "budget as truth": ({"vram_budget_bytes": True}, "vram_budget_bytes is True"),
    "RAM as text": ({"ram_budget_bytes": "8"}, "ram_budget_bytes is '8'"),
    "layers below 0": ({"gpu_layers": -1}, "gpu_layers is -1"),
    "no risk at all": ({"mode": "certified", "risk": 0}, r"risk is 0; expected a share .* above 0 and below 1"),
    "risk is no number": ({"mode": "certified", "risk": math.nan}, "risk is nan; expected a share"),
    "all the risk": ({"mode": "certified", "risk": 1.0}, "risk is 1.0; expected"),
    "risk as text": ({"mode": "certified", "risk": "0.05"}, "risk is '0.05'; expected"),
    "risk as truth": ({"mode": "certified", "risk": True}, "risk is True; expected"),
    "risk of another mode": ({"mode": "specee", "risk": 0.05}, "risk is of mode certified and the mode is specee"),
    "risk without a mode": ({"risk": 0.05}, "risk is of mode certified and the mode is not given"),
}

EARLY: dict[str, Any] = {"mode": "specee", "exit_layers": (1, 2)}
BAD_PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "mode": ({"mode": "lossy"}, "mode is 'lossy', expected one of full, exact"),
    "kv type": ({"kv_type": "fp8"}, "kv_type is 'fp8', expected one of fp32"),
    "kv type as a list": ({"kv_type": []}, r"kv_type is \[\]"),
    "chunk": ({"prefill_chunk_tokens": 0}, "prefill_chunk_tokens is 0, expected a whole number from 1"),
    "no draft tokens": ({"draft_length": 0}, "draft_length is 0, expected a whole number from 1 to 16"),
    "draft tokens": ({"draft_length": 17}, "draft_length is 17"),
    "no sequences": ({"n_sequences": 0}, "n_sequences is 0, expected a whole number from 1 to 65"),
    "no threads": ({"threads": 0}, "threads is 0, expected a whole number from 1 to 1024"),
    "threads": ({"threads": 10**5}, "threads is 100000"),
    "threads as text": ({"threads": "2"}, "threads is '2'"),
    "no context": ({"context_tokens": 0}, "context_tokens is 0"),
    "context": ({"context_tokens": 2**24 + 1}, "context_tokens is 16777217"),
    "VRAM": ({"vram_budget_bytes": -1}, "vram_budget_bytes is -1"),
    "VRAM budget exceeded": ({"vram_budget_bytes": 5}, "bytes of the gpu's memory and its budget is 5"),
    "RAM budget exceeded": ({"ram_budget_bytes": 5}, "bytes of the cpu's memory and its budget is 5"),
    "no memory": ({"memory": ()}, r"part 'embedding' needs a GPU and no memory is planned"),
    "a part twice": ({"parts": GOOD.parts + GOOD.parts[:1]}, "part 'embedding' occurs twice"),
    "drafts in full mode": ({"drafts": SEQUENCE, "exit_layer": 0}, "mode 'full' does not go with drafts 'sequence'"),
    "drafts": ({"drafts": "dice"}, "drafts is 'dice', expected exit, sequence or nothing"),
    "drafts as a list": ({"drafts": []}, r"drafts is \[\]"),
    "an exit before any layer": ({"mode": "exact", "drafts": EXIT, "exit_layer": 0}, "'exit' and exit layer 0"),
    "an exit below": ({"mode": "exact", "drafts": EXIT, "exit_layer": -1}, "'exit' and exit layer -1"),
    "a sequence from a layer": ({"mode": "exact", "drafts": SEQUENCE, "exit_layer": 1}, "'sequence' and exit layer 1"),
    "exact without drafts": ({"mode": "exact"}, "mode 'exact' does not go with drafts None"),
    "exits in full mode": ({"exit_layers": (1,)}, r"mode 'full' does not go with exit layers \(1,\)"),
    "exits that descend": (EARLY | {"exit_layers": (2, 1)}, r"does not go with exit layers \(2, 1\)"),
    "exits twice": (EARLY | {"exit_layers": (1, 1)}, r"does not go with exit layers \(1, 1\)"),
    "an exit before the first": (EARLY | {"exit_layers": (0,)}, r"does not go with exit layers \(0,\)"),
    "risk of specee": (EARLY | {"risk": 0.05}, "mode 'specee' does not go with risk 0.05"),
    "certified without risk": (EARLY | {"mode": "certified"}, "mode 'certified' does not go with risk None"),
    "risk": (EARLY | {"mode": "certified", "risk": 2.0}, "risk is 2.0; expected"),
    "drafts of specee": (EARLY | {"drafts": EXIT, "exit_layer": 1}, "'specee' does not go with drafts 'exit'"),
    "version": ({"version": 1}, "plan version 1, this engine reads version 7"),
}

BAD_PLACES = [
    (1, "gpu", "cpu"),
    (1, "visit", "visit"),
    (3, "stream", "cpu"),
    (5, "cpu", "gpu"),
    (5, "disk", "visit"),
    (0, "gpu", "cpu"),
    (0, "stream", "stream"),
    (-1, "stream", "stream"),
    (-1, "cpu", "gpu"),
    (-1, "gpu", "visit"),
]


def placed(index: int, decode: str, prefill: str) -> Plan:
    parts = list(GOOD.parts)
    parts[index] = replace(parts[index], decode_placement=decode, prefill_placement=prefill)
    return replace(GOOD, parts=tuple(parts))


@pytest.mark.parametrize("name", BAD_LIMITS)
def test_limits_that_make_no_sense(name: str) -> None:
    values, words = BAD_LIMITS[name]
    with pytest.raises(UsageError, match=words):
        Limits(**values)


@pytest.mark.parametrize("name", BAD_PLANS)
def test_plans_that_make_no_sense(name: str, tmp_path: Path) -> None:
    values, words = BAD_PLANS[name]
    with pytest.raises(UsageError, match=words):
        replace(GOOD, **values)
    document = json.loads(to_json(GOOD)) | json.loads(
        json.dumps(values, default=lambda part: json.loads(to_json(part)))
    )
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"can't be used .*; make one with hetero-ee plan --json"):
        Plan.load(file)


@pytest.mark.parametrize(("index", "decode", "prefill"), BAD_PLACES)
def test_places_where_a_part_can_not_be(index: int, decode: str, prefill: str) -> None:
    with pytest.raises(UsageError, match="can't be on"):
        placed(index, decode, prefill)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"parts": GOOD.parts[:-1]}, "the plan's 7 parts are not the model's 8, from 'head' on"),
        ({"parts": GOOD.parts[::-1]}, "from 'head' on"),
        ({"parts": (replace(GOOD.parts[0], name="soul"), *GOOD.parts[1:])}, "from 'soul' on"),
        ({"parts": (GOOD.parts[0], replace(GOOD.parts[1], layer=1), *GOOD.parts[2:])}, "from 'layers.0.attention' on"),
        ({"mode": "exact", "drafts": EXIT, "exit_layer": 3}, "exits after layer 3 and the model has 3"),
        ({"mode": "exact", "drafts": EXIT, "exit_layer": HUGE}, "exits after layer 1000"),
        (EARLY | {"exit_layers": (1, 3)}, "exits after layer 3 and the model has 3"),
        ({"shapes_sha256": "0"}, "of a 'LlamaForCausalLM' with other shapes"),
    ],
)
def test_plans_that_do_not_fit_the_model(values: dict[str, Any], words: str) -> None:
    made = replace(GOOD, **values)
    with pytest.raises(UsageError, match=words):
        check_fits(made, SPEC)


def test_plans_of_before_a_field_came_are_of_the_same_model() -> None:
    config = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "vocab_size": 128}
    # By the first engine of version 7.
    old = {"LlamaForCausalLM": "eaaebf06560d4120", "Qwen3ForCausalLM": "0778bddf0849f739"}
    assert {name: shapes_sha256(read_spec(config | {"architectures": [name]})) for name in old} == old
    later = {
        "logit_cap": 30.0,
        "norm_offset": 1.0,
        "matrix_layouts": (("x", "int8"),),
        "layer_ropes": (None,) * SPEC.n_layers,
    }
    models = [SPEC, *(replace(SPEC, **{name: value}) for name, value in later.items())]
    assert SPEC.rope is not None
    models.append(replace(SPEC, rope=replace(SPEC.rope, interleaved=True)))
    assert len(set(map(shapes_sha256, models))) == len(models)


def test_a_plan_of_another_version_is_told_by_it_whatever_its_fields(tmp_path: Path) -> None:
    body = json.loads(to_json(GOOD)) | {"version": 5, "colour": "red"}
    del body["prefill_chunk_tokens"]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(body))
    with pytest.raises(UsageError, match=r"used \(it has plan version 5, this engine reads version 7\); make one with"):
        Plan.load(file)


def test_a_good_plan_is_read_back(tmp_path: Path) -> None:
    GOOD.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read == GOOD
    opens_and_runs(read)


def test_a_plan_of_an_early_exit_mode_is_read_back(tmp_path: Path) -> None:
    made = replace(GOOD, **EARLY | {"mode": "certified", "risk": 0.05})
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    assert len({each.sha256 for each in (GOOD, made, replace(made, risk=0.1), replace(made, exit_layers=(1,)))}) == 4
    check_fits(made, SPEC)


def test_a_plan_from_before_early_exits_opens(tmp_path: Path) -> None:
    body = json.loads(to_json(GOOD))
    for name in Plan.ADDED_FIELDS:
        del body[name]
    (tmp_path / "plan.json").write_text(json.dumps(body))
    assert Plan.load(tmp_path / "plan.json") == GOOD


@pytest.mark.parametrize("exit_kv", [None, "lazy", "copy"])
def test_a_plan_that_names_how_skipped_layers_are_filled_opens_if_it_is_the_way_of_today(
    tmp_path: Path, exit_kv: str | None
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(json.loads(to_json(GOOD)) | {"exit_kv": exit_kv}))
    if exit_kv == "copy":
        with pytest.raises(UsageError, match="exit_kv is 'copy', which is no longer supported"):
            Plan.load(tmp_path / "plan.json")
    else:
        assert Plan.load(tmp_path / "plan.json") == GOOD


@pytest.mark.parametrize("mode", EARLY_EXIT_MODES)
def test_early_exit_modes_are_planned_where_they_are_asked_for(mode: str) -> None:
    made = planned(SPEC, overrides=PINS, context_tokens=64, mode=mode, vram_margin_bytes=0)
    assert made.mode == mode and (made.risk == RISK) == (mode == "certified")
    words = [word for pin in pins(made, Limits(mode=mode)) for word in pin]
    assert ("--risk" in words) == (mode == "certified")


def opens_and_runs(made: Plan) -> None:
    """On the emulated machine, without numbers: a prompt in chunks, and a token where there is room."""
    with_room = min(20, made.context_tokens)
    executor = dummy(SPEC, made, reference_profile(LAPTOP), Timeline())
    try:
        sequence, chunk = executor.cache.open_new(), made.prefill_chunk_tokens
        starts = range(0, with_room, chunk)
        executor.prompt(Batch.of_sequence(sequence, i, [0] * min(chunk, with_room - i)) for i in starts)
        if with_room < made.context_tokens:
            executor.logits(Batch((0,), (sequence,), (with_room,)), (0,))
    finally:
        executor.close()


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(-HUGE, HUGE),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["gpu", "cpu", "disk", "stream", "visit", "exact", "full", "exit", "sequence", "int8", "fp16"]),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
)


def mutated(draw: st.DrawFn, body: Any) -> Any:
    """The document with one value changed, left out, put in twice, or put elsewhere."""
    if not isinstance(body, dict | list) or not body or draw(st.integers(0, 7)) == 0:
        return draw(values)
    keys = list(body) if isinstance(body, dict) else list(range(len(body)))
    key = draw(st.sampled_from(keys))
    change = draw(st.sampled_from(["into"] * 6 + ["out", "twice", "swap"]))
    changed = dict(body) if isinstance(body, dict) else list(body)
    if change == "out":
        del changed[key]
    elif change == "into":
        changed[key] = mutated(draw, body[key])
    elif change == "swap":
        other = draw(st.sampled_from(keys))
        changed[key], changed[other] = body[other], body[key]
    elif isinstance(changed, list):
        changed.append(body[key])
    else:
        changed[f"{key}2"] = body[key]
    return changed


@settings(max_examples=400)
@given(st.data())
def test_any_change_of_a_plan_runs_or_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    file = tmp_path_factory.getbasetemp() / "changed.json"
    body = json.loads(to_json(GOOD))
    for _ in range(data.draw(st.integers(1, 3))):
        body = mutated(data.draw, body)
    file.write_text(json.dumps(body))
    try:
        made = Plan.load(file)
        check_fits(made, SPEC)
        opens_and_runs(made)
    except UsageError as error:
        assert str(error) and "\n" not in str(error)


def changed(body: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The body of a plan with another number in its second part, or in its prediction."""
    if name in body["parts"][1]:
        body["parts"][1][name] = value
    else:
        body["prediction"][name] = value
    return body


@pytest.mark.parametrize("name", ["weight_bytes", "kv_bytes", "decode_s", "prefill_s", "request_s"])
def test_a_plan_that_was_changed_after_it_was_made_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    GOOD.save(file)
    file.write_text(json.dumps(changed(json.loads(file.read_text()), name, 1)))
    with pytest.raises(UsageError, match=r"can't be used \(it was changed after it was made\); make one with"):
        Plan.load(file)


def test_a_field_added_later_leaves_plans_valid(tmp_path: Path) -> None:
    @dataclass(frozen=True, slots=True)
    class LaterPlan(Plan):
        added: float | None = None

        ADDED_FIELDS: ClassVar = (*Plan.ADDED_FIELDS, "added")

    GOOD.save(tmp_path / "plan.json")
    assert LaterPlan.load(tmp_path / "plan.json").added is None


@pytest.mark.parametrize("name", ["weight_bytes", "kv_bytes"])
def test_a_plan_with_other_bytes_than_the_model_is_refused_without_a_checksum(name: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(changed(json.loads(to_json(GOOD)), name, 1)))
    with pytest.raises(UsageError, match=r"bytes of weights and KV cache of layers\.0\.attention, the model has"):
        check_fits(Plan.load(file), SPEC)
