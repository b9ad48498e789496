"""--draft-tree from end to end: the demo model's draft head branches, and the tokens are full mode's."""

from typing import Any

import pytest
import torch

from hetero_ee import Engine
from hetero_ee.errors import UsageError
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.pins import pins
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.choice import drafted_choices
from hetero_ee.runtime.drafted import DraftEnd, DraftNoise
from hetero_ee.speculation.statistics import BRANCH
from hetero_ee_profiles.reference import reference_profile
from tests.emulation import LAPTOP
from tests.pure.test_gpu_plans import PROMPT, llama, plan_of  # noqa: F401
from tests.stand_in_machine import on_stand_in

PROMPTS = ["Once upon a time", "Tom and his mom went to the store."]


@pytest.mark.parametrize("gpu_layers", [0, 6, 12])
def test_the_demos_head_branches_and_no_token_changes(kernels: Any, gpu_layers: int) -> None:
    found, n_right = [], 0
    for mode, tree in (("full", None), ("exact", 16)):
        limits = Limits(mode=mode, gpu_layers=gpu_layers, draft_tree=tree)
        with Engine.from_pretrained(
            threads=1, profile=reference_profile(LAPTOP), emulate=True, limits=limits
        ) as engine:
            texts = []
            for temperature in (0.0, 1.0):
                for prompt in PROMPTS:
                    options = {"max_new_tokens": 48, "temperature": temperature, "seed": 3}
                    texts.append(engine.generate(prompt, **options).token_ids)
                    origins = [] if engine.draft_statistics is None else engine.draft_statistics.origins
                    n_right += sum(each.n_accepted for each in origins if each.origin == BRANCH)
            found.append(texts)
            if tree and engine.plan is not None:
                assert ("--draft-tree", "16") in pins(engine.plan, limits)
    assert found[0] == found[1]
    assert n_right > 0 or gpu_layers < 12  # rows cost more on the CPU


def test_a_gpu_chooses_what_the_cpu_would(llama: Any) -> None:  # noqa: F811
    """The first three, greedy and with noise, without the ones before."""
    executor = on_stand_in(*llama, plan_of(llama, "all on the GPU"))
    hidden = executor.hidden(Batch.of_sequence(executor.cache.open_new(), 0, PROMPT[:5]))
    end = DraftEnd(n_choices=3)
    logits = executor.draft_logits(hidden, end).clone()
    for temperature in (0.0, 0.7):
        noise = [DraftNoise(temperature, 5, 0, position) for position in range(5)]
        for found, row, one in zip(executor.draft(hidden, noise, end), logits, noise, strict=True):
            expected = drafted_choices(row.as_subclass(torch.Tensor), one, None, 3)
            for each, other in zip((found, *found.others), (expected, *expected.others), strict=True):
                assert each.token_id == other.token_id and each.confidence == pytest.approx(other.confidence, rel=1e-4)
            assert len({found.token_id, *(other.token_id for other in found.others)}) == 3
    executor.close()


@pytest.mark.parametrize("n_tokens", [-1, 33, True, "8"])
def test_a_tree_that_is_none_is_refused(n_tokens: Any) -> None:
    with pytest.raises(UsageError, match="expected 0 to 32"):
        Limits(draft_tree=n_tokens)
