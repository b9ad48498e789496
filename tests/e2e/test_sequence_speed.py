"""What the demo model's draft sequences gain on an emulated machine by ending in time and by n-grams around them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hetero_ee import Engine
from hetero_ee.planning.limits import Limits
from hetero_ee.speculation import opening
from hetero_ee.speculation.stop_rule import MarginalRule
from hetero_ee_profiles.reference import reference_profile
from tests.emulation import LAPTOP

STORIES = ["Once upon a time", "The big dog", "Tom and his mom went to the store.", "One morning, a rabbit"]
ONE_LENGTH, NO_NGRAMS, ALL = "sequences of one length", "no n-grams", "all"


class OneLength(MarginalRule):
    """Four drafts, whatever they look like."""

    def is_worth(self, chances: Sequence[float], draft_s: float) -> bool:
        return len(chances) <= 4


@pytest.fixture(scope="module")
def engines(demo: Path) -> Iterator[dict[str, Engine]]:
    """Drafting in each way, half of the layers on the GPU; and full mode."""
    opened = {"full": _opened("full")}
    with pytest.MonkeyPatch.context() as patched:
        opened[ALL] = _opened("exact")
        patched.setattr(opening, "SOURCES", opening.SOURCES[1:])
        opened[NO_NGRAMS] = _opened("exact")
        patched.setattr(opening, "MarginalRule", OneLength)
        opened[ONE_LENGTH] = _opened("exact")
        yield opened
    for engine in opened.values():
        engine.close()


def _opened(mode: str) -> Engine:
    limits = Limits(mode=mode, gpu_layers=6)
    return Engine.from_pretrained(threads=1, profile=reference_profile(LAPTOP), emulate=True, limits=limits)


def seconds_a_token(engine: Engine, prompt: list[str], expected: Engine) -> float:
    """By the emulated clock; the tokens are those of the other."""
    results = engine.generate(prompt, max_new_tokens=96)
    assert [found.token_ids for found in results] == [
        found.token_ids for found in expected.generate(prompt, max_new_tokens=96)
    ]
    return sum(len(found.token_ids) / found.generated_tokens_per_s for found in results) / len(results)


@pytest.mark.sample(0)
def test_on_stories_nothing_is_lost(engines: dict[str, Engine]) -> None:
    times = {
        how: sum(seconds_a_token(engine, [story], engines["full"]) for story in STORIES)
        for how, engine in engines.items()
    }
    assert times[ALL] < 1.03 * times[NO_NGRAMS] and times[NO_NGRAMS] < times[ONE_LENGTH]
    assert 2 * times[ALL] < times["full"]
