"""Plans of 20 pairs of model and machine stay as they are: placements, memory, expected times."""

import json

import pytest

from tests.golden.plans import GOLDEN_FILE, plans_of, profiles, specs

SPECS, PROFILES = specs(), profiles()


@pytest.mark.parametrize("machine", PROFILES)
@pytest.mark.parametrize("model", SPECS)
def test_plans_do_not_change(model: str, machine: str) -> None:
    golden = json.loads(GOLDEN_FILE.read_text())[f"{model} on {machine}"]
    made = plans_of(SPECS[model], PROFILES[machine])
    assert made.keys() == golden.keys()
    for request, found in made.items():
        assert found["decided"] == golden[request]["decided"], request
        assert found["expected"] == pytest.approx(golden[request]["expected"], rel=1e-11), request
