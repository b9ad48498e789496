"""Mode specee with candidates of a draft: an EAGLE-3 head, which reads states of several layers, and a draft model."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from hetero_ee import Engine
from hetero_ee.calibration.job import CalibrationRequest
from hetero_ee.calibration.traces import trace
from hetero_ee.decoding.requests import Ending, Request
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.early_exit import EarlyExits
from hetero_ee.speculation.policies.policy import ExitJudge
from hetero_ee_profiles.reference import reference_profile
from tests.drafted_generation import generate_early
from tests.e2e.test_calibration import SETTINGS, text_of
from tests.eagle3_heads import DIALECTS, save_eagle3
from tests.emulation import LAPTOP

REQUEST = CalibrationRequest((text_of(700),), 600, "words", SETTINGS)


class _Recorder:
    """Stands for DraftCandidates: keeps the states of every position."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.states: list[list[Tensor]] = []

    def read_prompt(self, batch: Batch, *states: Tensor) -> None:
        self.observe(batch, *states)

    def observe(self, batch: Batch, *states: Tensor) -> None:
        assert batch.positions == tuple(range(len(self.tokens), len(self.tokens) + len(batch.token_ids)))
        self.tokens += batch.token_ids
        self.states += [[each.clone() for each in row] for row in zip(*states, strict=True)]

    def close(self, sequence: int) -> None:
        pass


class _Thirds:
    """A policy that lets two of three tokens exit after a layer."""

    ends: ClassVar[dict[int, None]] = {1: None}

    def judging(self, executor: Any, sampler: DraftSampler) -> "_ThirdsJudge":
        return _ThirdsJudge(executor, sampler, self)


class _ThirdsJudge(ExitJudge[Any]):
    def judge(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[int | None]:
        return [None if len(each.token_ids) % 3 == 0 else len(each.token_ids) for each in requests]


def test_a_draft_observes_what_has_passed_every_layer_as_in_full_mode(tiny: Path) -> None:
    with Engine.from_pretrained(tiny, threads=1, profile="off") as engine:
        executor, recorder = engine.executor, _Recorder()
        executor.capture((0, 2))
        exits = EarlyExits(_Thirds(), 7, recorder)  # type: ignore[arg-type]
        prompt, params = [1, 50, 60, 70], SamplingParams(max_new_tokens=20)
        ending = Ending(frozenset(), 100)
        found = list(generate_early(executor, [prompt], params, ending, lambda ids: "", lambda: 0.0, exits))
        whole = [*prompt, *(token.token_id for token in found)]
        assert recorder.tokens == whole[: len(recorder.tokens)] and len(recorder.tokens) > 20
        expected = trace(executor, recorder.tokens).states
        for place, state in enumerate(expected):
            rows = torch.stack([each[place] for each in recorder.states])
            torch.testing.assert_close(rows, state, rtol=1e-4, atol=1e-4)


def test_a_head_that_reads_several_layers_calibrates_and_runs(tiny: Path, tmp_path: Path) -> None:
    head = save_eagle3(tmp_path / "head", DIALECTS["EAGLE-3.1"], model=read_spec(tiny))
    options: dict[str, Any] = {"threads": 1, "profile": reference_profile(LAPTOP), "emulate": True, "progress": False}
    with Engine.from_pretrained(tiny, mode="full", draft_head=head, **options) as engine:
        full = engine.generate("Once", max_new_tokens=12).token_ids
        made = engine.calibrate(REQUEST).calibration
        assert engine.generate("Once", max_new_tokens=12).token_ids == full  # and nothing is captured any more
        assert engine.executor.capturing == ()
        again = engine.calibrate(REQUEST)
    assert not again.is_new and made.drafted is not None and made.drafted.draft == "the draft head in head"
    assert len(made.drafted.exit_layers) == engine.spec.n_layers - 1 and sum(made.drafted.depths) > 0
    for scheduling in ("none", "both"):
        early = {"mode": "specee", "draft_head": head, "exit_schedule": scheduling}
        with Engine.from_pretrained(tiny, **early, **options) as engine:
            engine.generate("Once", max_new_tokens=12)
            assert engine.exit_statistics is not None and engine.exit_statistics.n_tokens == 11
    early["draft_head"] = shutil.copytree(head, tmp_path / "other")
    with pytest.warns(UserWarning, match="calibrated without the draft head in other"):
        Engine.from_pretrained(tiny, **early, **options).close()


@pytest.mark.sample(0)
def test_a_calibration_without_a_draft_is_made_again_with_it(own_tiny: Path) -> None:
    with Engine.from_pretrained(own_tiny, threads=1, profile="off") as engine:
        assert engine.calibrate(replace(REQUEST, force=True)).calibration.drafted is None
    profile = reference_profile(LAPTOP)
    options: dict[str, Any] = {"threads": 1, "profile": profile, "emulate": True, "draft_model": own_tiny}
    with Engine.from_pretrained(own_tiny, mode="full", **options) as engine:
        outcome = engine.calibrate(REQUEST)
    drafted = outcome.calibration.drafted
    assert outcome.is_new and drafted is not None and drafted.coverage == 1  # it drafts for itself
    with Engine.from_pretrained(own_tiny, mode="specee", **options) as engine:
        engine.generate("Once", max_new_tokens=12)
        assert engine.exit_statistics is not None and engine.exit_statistics.n_tokens == 11
