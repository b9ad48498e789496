"""The server in exact mode, where requests alternate, with the demo model's own drafts on an emulated machine."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hetero_ee import Engine
from tests.emulation import LAPTOP
from tests.server_support import RunningServer, serving

STORIES = ("Once upon a time", "Tom had a dog.", "Lily and Ben went to the park.")


@pytest.fixture(scope="module")
def server(demo: Path) -> Iterator[RunningServer]:
    with (
        Engine.from_pretrained(demo, threads=1, profile=LAPTOP, emulate=True, mode="exact") as engine,
        serving(engine, n_slots=3) as running,
    ):
        assert engine.drafting is not None
        yield running


def test_clients_and_their_next_turns_get_the_tokens_that_generate_gives(server: RunningServer) -> None:
    def talk(number: int) -> tuple[str, str, int]:
        first = STORIES[number] + server.text_of(STORIES[number], max_tokens=30, ignore_eos=True)
        more = server.completion(f"{first} Then", max_tokens=20, temperature=0.7, seed=number)
        return first, more["choices"][0]["text"], more["usage"]["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(len(STORIES)) as clients:
        said = list(clients.map(talk, range(len(STORIES))))
    for number, (first, more, n_cached) in enumerate(said):
        assert (
            first == STORIES[number] + server.engine.generate(STORIES[number], max_new_tokens=30, ignore_eos=True).text
        )
        alone = server.engine.generate(f"{first} Then", max_new_tokens=20, temperature=0.7, seed=number)
        assert more == alone.text and 20 < n_cached < alone.n_prompt_tokens
