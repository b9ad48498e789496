"""Engine.from_pretrained refuses what it can't use: one sentence that names the argument, its value and the way out."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine, HeteroError, ModelError, UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import SEQUENCE, Plan
from hetero_ee_profiles.records import write_record
from hetero_ee_profiles.reference import reference_profile
from tests.draft_heads import save_head
from tests.emulation import LAPTOP, planned

PROFILE = reference_profile(LAPTOP)
NO_GPU = replace(PROFILE, gpu=None, link=None)


@pytest.fixture(scope="module")
def on_gpu(demo: Path) -> Plan:
    """Of the demo model, three layers of it on the GPU."""
    return planned(read_spec(demo), mode="full", gpu_layers=3, context_tokens=256)


@pytest.fixture
def files(tmp_path: Path, on_gpu: Plan) -> Path:
    """Plans in files, good and bad."""
    on_gpu.save(tmp_path / "good.json")
    (tmp_path / "junk.json").write_text("[1,2")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.json").mkdir()
    return tmp_path


def refusal(kind: type[HeteroError] = UsageError, **options: Any) -> str:
    """The sentence."""
    with pytest.raises(kind) as caught, Engine.from_pretrained(threads=1, **options):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "plan a number": ({"plan": 5}, "plan is 5; expected a Plan, or a file"),
    "plan a dictionary": ({"plan": {}}, "plan is {}; expected a Plan"),
    "profile of no name": (
        {"profile": "laptop"},
        "'laptop' is not a shipped profile; `hetero-ee profile --list` lists",
    ),
    "profile no file": ({"profile": Path("x")}, "the profile x can't be used ("),
    "profile no file, emulated": ({"profile": "./x", "emulate": True}, "the profile ./x can't be used ("),
    "profile a number": ({"profile": 1}, "profile is 1; expected 'auto', 'off', a HardwareProfile, the name"),
    "limits a dictionary": ({"profile": PROFILE, "limits": {"gpu_layers": 0}}, "expected Limits(...)"),
    "limits nothing much": ({"profile": PROFILE, "limits": {}}, "limits is {}; expected Limits(...)"),
    "limits without profile": ({"limits": Limits()}, "limits needs a plan, and profile is off"),
    "budget as text": ({"profile": PROFILE, "vram_budget": "8GB"}, "vram_budget is '8GB'; expected GiB"),
    "budget in bytes": ({"profile": PROFILE, "vram_budget": 2**33}, "vram_budget is 8589934592; expected GiB"),
    "budget a truth": ({"profile": PROFILE, "ram_budget": True}, "ram_budget is True; expected GiB"),
    "budget below 0": ({"profile": PROFILE, "vram_budget": -0.1}, "vram_budget is -0.1; expected GiB"),
    "budget no number": ({"profile": PROFILE, "vram_margin": float("nan")}, "vram_margin is nan; expected GiB"),
    "budget without profile": ({"vram_budget": 0}, "vram_budget needs a plan, and profile is off"),
    "head without profile": ({"draft_head": "."}, "draft_head needs a plan, and profile is off"),
    "layers below 0": ({"profile": PROFILE, "gpu_layers": -1}, "gpu_layers is -1; expected a whole number from 0"),
    "override a number": ({"profile": PROFILE, "override": 3}, "override is 3; expected REGEX=gpu"),
    "override of no place": ({"profile": PROFILE, "override": ["ffn=moon"]}, "names no placement"),
    "kv type": ({"profile": PROFILE, "kv_type": "int3"}, "kv_type is 'int3'; expected one of fp32"),
    "mode": ({"profile": PROFILE, "mode": "fast"}, "mode is 'fast'; expected one of full, exact"),
    "draft length": (
        {"profile": PROFILE, "draft_length": 99},
        "draft_length is 99; expected a whole number from 1",
    ),
    "two limits": ({"limits": Limits(), "mode": "full"}, "limits already decides what mode would"),
    "progress": ({"progress": "loud"}, "progress is 'loud'; expected a function, True, False or None"),
    "emulate as text": ({"profile": PROFILE, "emulate": "yes"}, "emulate is 'yes'; expected true or false"),
    "emulate nothing": ({"emulate": True}, "which machine is to be emulated?"),
    "head a number": ({"draft_head": 5}, "draft_head is 5; expected the folder of a draft head"),
    "head of no name": ({"draft_head": ""}, "draft_head is ''; expected the folder"),
    "head missing": ({"draft_head": "/missing"}, "draft_head '/missing' is not a folder"),
    "head no file can be": ({"draft_head": "a\0b"}, r"draft_head 'a\x00b' is not a folder"),
    "head missing, planned": ({"draft_head": "/missing", "profile": PROFILE, "emulate": True}, "is not a folder"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_of_wrong_types_and_values(name: str) -> None:
    options, words = BAD[name]
    assert words in refusal(**options)


def test_they_are_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    missing = tmp_path / "no model"
    assert "plan is 5" in refusal(model=missing, plan=5)
    assert "is not a folder" in refusal(model=missing, draft_head=tmp_path / "no head")


@pytest.mark.parametrize("name", ["missing", "junk", "list", "binary", "folder"])
def test_files_that_hold_no_plan(files: Path, name: str) -> None:
    file = files / f"{name}.json"
    assert f"the plan {file} can't be used (" in refusal(plan=file)
    assert "make one with hetero-ee plan" in refusal(plan=str(file))


def test_a_plan_of_another_model(stories260k: Path, on_gpu: Plan) -> None:
    sentence = refusal(model=stories260k, plan=on_gpu, profile=PROFILE, emulate=True)
    assert "with other shapes; make one for this model" in sentence


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limits": Limits(gpu_layers=0)}, "what limits would; leave out limits"),
        ({"limits": Limits()}, "leave out limits"),
        ({"vram_budget": 0}, "leave out vram_budget"),
        ({"ram_budget": 1.5}, "leave out ram_budget"),
        ({"mode": "full"}, "leave out mode"),
        ({"context_tokens": 100}, "context_tokens is 100 and the plan is for 256"),
    ],
)
def test_what_a_plan_contradicts_is_not_dropped_in_silence(on_gpu: Plan, options: dict[str, Any], words: str) -> None:
    assert words in refusal(plan=on_gpu, profile=PROFILE, emulate=True, **options)
    assert words in refusal(plan=on_gpu, **options)


def test_limits_have_keywords_of_their_own(demo: Path) -> None:
    limits = Limits(
        vram_budget_bytes=2**27, vram_margin_bytes=2**29, ram_budget_bytes=3 * 2**30, gpu_layers=2, kv_type="fp16",
        mode="exact", draft_length=3, overrides=(("head", "cpu"), (r"layers\.0\..*", "gpu")),
    )  # fmt: skip
    keywords: dict[str, Any] = {"vram_budget": 1 / 8, "vram_margin": 0.5, "ram_budget": 3, "gpu_layers": 2}
    keywords |= {"kv_type": "fp16", "mode": "exact", "draft_length": 3}
    keywords |= {"override": ["head=cpu", r"layers\.0\..*=gpu"]}
    plans = []
    for options in ({"limits": limits}, keywords):
        with Engine.from_pretrained(demo, profile=LAPTOP, emulate=True, threads=1, **options) as engine:
            plans.append(engine.plan)
    assert plans[0] == plans[1] is not None


@pytest.mark.sample(0)
def test_a_profile_may_be_named_or_in_a_file(tmp_path: Path, demo: Path) -> None:
    write_record(PROFILE, tmp_path / "laptop.json")
    for profile in (LAPTOP, tmp_path / "laptop.json", str(tmp_path / "laptop.json"), lambda spec, folder: PROFILE):
        with Engine.from_pretrained(demo, profile=profile, emulate=True, threads=1) as engine:
            assert engine.plan_request is not None and engine.plan_request.profile == PROFILE


def test_a_plan_with_its_own_context_runs(files: Path, on_gpu: Plan) -> None:
    options: dict[str, Any] = {"profile": PROFILE, "emulate": True, "threads": 1}
    with Engine.from_pretrained(plan=str(files / "good.json"), context_tokens=256, **options) as engine:
        assert engine.plan == on_gpu and engine.context_tokens == 256


def test_a_machine_without_room_for_the_plan(on_gpu: Plan) -> None:
    assert PROFILE.gpu is not None
    n_bytes = on_gpu.n_bytes("gpu")
    small = replace(PROFILE, gpu=replace(PROFILE.gpu, free_bytes=n_bytes - 1))
    sentence = refusal(plan=on_gpu, profile=small, emulate=True)
    assert f"takes {n_bytes} bytes of the GPU's memory" in sentence and f"has {n_bytes - 1} free" in sentence
    assert f"takes {n_bytes} bytes of a GPU's memory and {LAPTOP} has none" in refusal(
        plan=on_gpu, profile=NO_GPU, emulate=True
    )
    ram_bytes = on_gpu.n_bytes("cpu") - 1
    poor = replace(PROFILE, machine=replace(PROFILE.machine, ram_bytes=ram_bytes))
    assert f"takes {ram_bytes + 1} bytes of RAM and {LAPTOP} has {ram_bytes}" in refusal(
        plan=on_gpu, profile=poor, emulate=True
    )


def test_what_finds_a_profile_finds_one_or_none() -> None:
    assert "found 'x'; expected a HardwareProfile" in refusal(profile=lambda spec, folder: "x")
    assert "no profile was found" in refusal(profile=lambda spec, folder: None, limits=Limits())
    with Engine.from_pretrained(threads=1, profile=lambda spec, folder: None) as engine:
        assert engine.plan is None


@pytest.fixture
def own_head(stories260k: Path, tmp_path: Path) -> Iterator[Path]:
    """A model whose folder brings a draft head of another model."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in stories260k.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_head(folder / "draft_head")
    yield folder


def test_a_head_that_was_named_is_read_or_refused_and_the_models_own_left_out(own_head: Path) -> None:
    options: dict[str, Any] = {"profile": PROFILE, "emulate": True, "threads": 1}
    refusal(UsageError, model=own_head, draft_head=own_head / "draft_head", profile=PROFILE, emulate=True)
    told: list[str] = []
    with Engine.from_pretrained(own_head, progress=lambda text, done, in_all: told.append(text), **options) as engine:
        made = engine.plan
        assert made is not None and engine.draft_origin == ""
    (warn,) = [text for text in told if "own draft head" in text]
    assert "Drafting without this model's own draft head." in warn
    drafting = replace(made, mode="exact", drafts=SEQUENCE, exit_layer=0, draft_length=4)
    with Engine.from_pretrained(own_head, plan=drafting, **options) as engine:
        assert engine.draft_origin == "n-grams"


def test_a_named_head_whose_weights_are_missing_is_an_error(demo: Path, tmp_path: Path, on_gpu: Plan) -> None:
    config = (demo / "draft_head" / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    drafting = replace(on_gpu, mode="exact", drafts=SEQUENCE, exit_layer=0, draft_length=4)
    sentence = refusal(ModelError, plan=drafting, profile=PROFILE, emulate=True, draft_head=tmp_path)
    assert str(tmp_path) in sentence
