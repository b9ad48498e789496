"""The server in exact mode, where requests share passes, and in an early-exit mode, where they alternate; emulated."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hetero_ee import Engine, UsageError
from hetero_ee.decoding.scoring import score
from tests.emulation import LAPTOP
from tests.server_support import RunningServer, serving

STORIES = ("Once upon a time", "Tom had a dog.", "Lily and Ben went to the park.")


@pytest.fixture(scope="module", params=["exact", "specee"])
def server(demo: Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with (
        Engine.from_pretrained(demo, threads=1, profile=LAPTOP, emulate=True, mode=request.param) as engine,
        serving(engine, n_slots=3) as running,
    ):
        assert (engine.drafting is None) == (engine.exits is not None)
        yield running


@pytest.mark.sample(1)
def test_clients_and_their_next_turns_get_the_tokens_that_generate_gives(server: RunningServer) -> None:
    def talk(number: int) -> tuple[str, str, int]:
        first = STORIES[number] + server.text_of(STORIES[number], max_tokens=30, ignore_eos=True)
        more = server.completion(f"{first} Then", max_tokens=20, temperature=0.7, seed=number)
        return first, more["choices"][0]["text"], more["usage"]["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(len(STORIES)) as clients:
        said = list(clients.map(talk, range(len(STORIES))))
    for story, number, (first, more, n_cached) in zip(STORIES, range(len(STORIES)), said, strict=True):
        assert first == story + server.engine.generate(story, max_new_tokens=30, ignore_eos=True).text
        alone = server.engine.generate(f"{first} Then", max_new_tokens=20, temperature=0.7, seed=number)
        assert more == alone.text
        n_story = len(server.engine.tokenizer.encode(story))
        assert n_cached == n_story if server.engine.exits is not None else 20 < n_cached < alone.n_prompt_tokens


def test_log_probabilities_are_the_full_models_or_refused(server: RunningServer) -> None:
    asked = {"prompt": STORIES[1], "max_tokens": 3, "temperature": 0, "logprobs": 1}
    answer = server.post("/v1/completions", asked)
    if server.engine.exits is None:
        found = answer.json()["choices"][0]["logprobs"]
        assert len(found["tokens"]) == 3
        assert [max(each.values()) for each in found["top_logprobs"]] == found["token_logprobs"]
        return
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "logprobs"
    with pytest.raises(UsageError, match="logprobs is 2; the full model's probabilities are not computed"):
        server.engine.generate(STORIES[1], max_new_tokens=2, logprobs=2)


def test_a_prompt_is_scored_in_exact_mode_and_drafted_on_from(server: RunningServer) -> None:
    if server.engine.exits is not None:
        asked = {"prompt": STORIES[2], "max_tokens": 0, "echo": True, "logprobs": 0}
        assert server.post("/v1/completions", asked).status_code == 400
        return
    alone = server.engine.generate(STORIES[2], max_new_tokens=12)
    answer = server.completion(STORIES[2], max_tokens=12, echo=True, logprobs=0)
    assert answer["choices"][0]["text"] == STORIES[2] + alone.text
    found = answer["choices"][0]["logprobs"]["token_logprobs"]
    ids = server.engine.tokenizer.encode(STORIES[2])
    logs = [torch.log_softmax(row.double(), 0) for row, _ in score(server.engine.executor, ids, 1)]
    assert found[1 : len(ids)] == pytest.approx([row[each].item() for row, each in zip(logs, ids[1:], strict=True)])
    assert len(found) == len(ids) + 12
