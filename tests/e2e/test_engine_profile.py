"""Engine.from_pretrained plans by this machine's profile without being asked, and never fails for want of it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine, HardwareProfile, HeteroError, UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan
from hetero_ee.profiling.kept import keep_profile
from hetero_ee.profiling.machine_profile import versions
from hetero_ee_profiles.hardware import MEASURED
from hetero_ee_profiles.host.host import this_host
from hetero_ee_profiles.machine import this_machine
from hetero_ee_profiles.reference import reference_profile
from tests.emulation import LAPTOP

PROMPT = "Once upon a time"
CPU_ONLY = replace(reference_profile(LAPTOP), gpu=None, link=None)
Measure = Callable[..., HardwareProfile]


class Told:
    """What progress was told."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def __call__(self, stage: str, n_done: int, n_all: int) -> None:
        self.stages.append(stage)


class Measuring:
    """Stands in for the measurement."""

    def __init__(self) -> None:
        self.n_asked = 0
        self.answer: Measure = lambda *_: CPU_ONLY

    def __call__(self, *arguments: object) -> HardwareProfile:
        self.n_asked += 1
        return self.answer(*arguments)


@pytest.fixture
def measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Measuring]:
    """On a machine that was never measured, with the settings as nobody has changed them."""
    found = Measuring()
    monkeypatch.setenv("HETERO_EE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("HETERO_EE_PROFILE")
    monkeypatch.setattr("hetero_ee.profiling.automatic.profile_here", found)
    yield found


def opened(model: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(model, **{"threads": 1, "quantizer": "rtn"} | options)


def fails(kind: type[BaseException], words: str) -> Measure:
    def measure(*_: object) -> HardwareProfile:
        raise kind(words)

    return measure


def test_a_plan_is_made_unless_it_is_off(tiny: Path, measuring: Measuring, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tiny) as planned, opened(tiny, profile="off") as off:
        assert planned.plan is not None and off.plan is None and measuring.n_asked == 1
        assert planned.plan_request is not None and planned.plan_request.profile == CPU_ONLY
        assert planned.generate(PROMPT, max_new_tokens=20).text == off.generate(PROMPT, max_new_tokens=20).text
    monkeypatch.setenv("HETERO_EE_PROFILE", "off")
    with opened(tiny) as off, opened(tiny, profile="auto") as planned:
        assert planned.plan is not None and off.plan is None and measuring.n_asked == 2


def test_a_kept_profile_is_not_measured_again(tiny: Path, measuring: Measuring, tmp_path: Path) -> None:
    machine = this_machine(this_host(), versions())
    cpu = (replace(CPU_ONLY.cpu[0], threads=1),)
    kept = replace(CPU_ONLY, name="kept", kind=MEASURED, machine=machine, cpu=cpu)
    keep_profile(tmp_path / "data", kept, read_spec(tiny), quick=True)
    with opened(tiny) as engine:
        assert engine.plan is not None and engine.plan.hardware == "kept" and measuring.n_asked == 0


@pytest.mark.parametrize("kind", [RuntimeError, OSError, HeteroError, KeyError])
def test_a_measurement_that_fails_is_told_and_no_more(tiny: Path, measuring: Measuring, kind: type[Exception]) -> None:
    measuring.answer, told = fails(kind, "the driver has gone"), Told()
    with opened(tiny, progress=told) as engine:
        assert engine.plan is None and engine.generate(PROMPT, max_new_tokens=3).n_generated_tokens == 3
    (remark,) = [stage for stage in told.stages if "driver" in stage]
    assert remark.startswith("No plan could be made or opened, so the CPU runs everything: ")
    assert not remark.endswith(".")
    with pytest.raises(HeteroError, match="driver has gone"):
        opened(tiny, kv_type="fp16")


def test_ctrl_c_ends_a_measurement_and_the_opening(tiny: Path, measuring: Measuring) -> None:
    measuring.answer = fails(KeyboardInterrupt, "")
    with pytest.raises(KeyboardInterrupt):
        opened(tiny)


def test_a_plan_that_can_not_be_made_is_told_unless_it_was_asked_for(tiny: Path, measuring: Measuring) -> None:
    small = replace(CPU_ONLY, cpu=tuple(replace(times, free_bytes=1) for times in CPU_ONLY.cpu))
    measuring.answer, told = (lambda *_: small), Told()
    with opened(tiny, progress=told) as engine:
        assert engine.plan is None and any("so the CPU runs everything" in stage for stage in told.stages)
    for asked in ({"mode": "full"}, {"vram_margin": 0.5}, {"limits": Limits()}, {"profile": small}):
        with pytest.raises(UsageError):
            opened(tiny, **asked)


def test_nothing_is_measured_for_fp32_weights_or_beside_a_plan(tiny: Path, measuring: Measuring) -> None:
    with opened(tiny, quantizer="none") as engine:
        assert engine.plan is None
    made = plan(read_spec(tiny), CPU_ONLY, Limits(context_tokens=64, threads=1))
    with opened(tiny, plan=made) as engine:
        assert engine.plan == made and engine.plan_request is not None and engine.plan_request.profile is None
    assert measuring.n_asked == 0
    with pytest.raises(UsageError, match="which machine is to be emulated"):
        opened(tiny, emulate=True)


def test_fp32_weights_are_planned_for_the_cpu_where_somebody_asks(tiny: Path, measuring: Measuring) -> None:
    measuring.answer = lambda *_: reference_profile(LAPTOP)
    with opened(tiny, quantizer="none", kv_type="fp16") as engine:
        assert engine.plan is not None and engine.plan.n_bytes("gpu") == 0


def test_what_is_planned_says_so(tiny: Path, measuring: Measuring) -> None:
    with opened(tiny) as engine:
        assert repr(engine) == f"<Engine {engine.plan!r}, rtn>"
        assert engine.plan is not None and repr(engine.plan).startswith(f"<Plan {engine.plan.sha256[:12]}: Llama")
        with engine.chat(chat_template="{{ messages[0].content }}") as talk:
            assert repr(talk) == f"<Conversation of 0 messages, 0 of {engine.context_tokens} tokens>"
        assert repr(talk) == "<Conversation of 0 messages, closed>"
    assert repr(CPU_ONLY).startswith(f"<HardwareProfile {LAPTOP}: Intel") and ", no GPU, derived 2026-" in repr(
        CPU_ONLY
    )


@pytest.mark.parametrize(
    ("doubts", "is_here", "asked", "expected"),
    [((), True, 0, 1), (("others ran",), True, 0, 2), ((), False, 0, 2), ((), True, 2, 2)],
)
def test_the_thread_count_is_the_fastest_measured_unless_given_provisional_or_of_another_machine(
    tiny: Path,
    measuring: Measuring,
    monkeypatch: pytest.MonkeyPatch,
    doubts: tuple[str, ...],
    is_here: bool,
    asked: int,
    expected: int,
) -> None:
    for place in ("hetero_ee.opening", "hetero_ee_profiles.host.process"):
        monkeypatch.setattr(f"{place}.physical_core_count", lambda: 2)
    fast = CPU_ONLY.cpu[0]
    second = replace(fast.overheads[0].layer, value=1.0, p80=1.0)
    slow = replace(fast, threads=2, overheads=tuple(replace(each, layer=second) for each in fast.overheads))
    machine = replace(CPU_ONLY.machine, n_cores=2 if is_here else 3)
    profile = replace(CPU_ONLY, cpu=(replace(fast, threads=1), slow), kind=MEASURED, doubts=doubts, machine=machine)
    measuring.answer = lambda *_: profile
    with opened(tiny, threads=asked) as engine:
        assert engine.plan is not None and engine.plan.threads == engine.threads == expected
