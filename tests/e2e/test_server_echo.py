"""Prompts echoed with their log-probabilities, several of them in one request, as lm-evaluation-harness asks."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee.kv.batch import Batch
from tests.server_support import RunningServer, events, eventually, opened, serving

PROMPT = "Once upon a time, there was a dog"
LONG = [(7 * i + 3) % 200 + 5 for i in range(300)]  # of more than two passes


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[RunningServer]:
    with opened(tiny) as engine, serving(engine) as running:
        yield running


def reference(server: RunningServer, ids: list[int]) -> torch.Tensor:
    """(tokens, vocab) by torch from one pass of the engine's executor: row i is of the token after ids[i]."""
    executor = server.engine.executor
    sequence = executor.cache.open_new()
    try:
        logits = executor.logits(Batch.of_sequence(sequence, 0, ids), range(len(ids)))
        return torch.log_softmax(logits.double(), 1)
    finally:
        executor.cache.close(sequence)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_loglikelihoods_are_those_of_the_executor(server: RunningServer, max_tokens: int) -> None:
    asked: Any = {"max_tokens": max_tokens, "logprobs": 1, "echo": True, "seed": 1234}  # as lm_eval's local-completions
    prompts = [server.engine.tokenizer.encode(PROMPT), LONG, LONG[:1]]
    answer = server.completion(prompts, **asked)
    for index, (ids, choice) in enumerate(zip(prompts, answer["choices"], strict=True)):
        found, logs = choice["logprobs"], reference(server, ids)
        said = server.engine.generate(ids, max_new_tokens=max_tokens).token_ids if max_tokens else ()
        whole = [*ids, *said]
        own = [logs[i, each].item() for i, each in enumerate(whole[1:])]
        assert (choice["index"], choice["finish_reason"]) == (index, "length")
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:] == pytest.approx(own, abs=1e-5)
        assert [max(each.values()) for each in found["top_logprobs"][1:]] == pytest.approx(
            logs.amax(1)[: len(whole) - 1].tolist(), abs=1e-5
        )
        assert found["tokens"] == [server.engine.tokenizer.token_text(each) for each in whole]
        assert len(found["text_offset"]) == len(whole)
    assert answer["choices"][0]["text"].startswith(PROMPT)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == len(prompts) * max_tokens
    eventually(server.is_idle)


def test_a_stream_echoes_the_same(server: RunningServer) -> None:
    for asked in ({"max_tokens": 0, "logprobs": 2}, {"max_tokens": 5, "logprobs": 2}, {"max_tokens": 5}):
        body: Any = {"prompt": PROMPT, "temperature": 0, "echo": True} | asked
        (whole,) = server.completion(PROMPT, echo=True, **asked)["choices"]
        answer = server.post("/v1/completions", body | {"stream": True})
        pieces = [each["choices"][0] for each in events(iter(answer.text.splitlines()))]
        assert "".join(each["text"] for each in pieces) == whole["text"] and whole["text"].startswith(PROMPT)
        for key, values in (whole["logprobs"] or {}).items():
            assert [one for each in pieces if each["logprobs"] for one in each["logprobs"][key]] == values


def test_several_prompts_and_texts_are_what_each_is_alone(server: RunningServer) -> None:
    prompts, params = [PROMPT, "Tom"], {"temperature": 1.2, "seed": 7}
    answer = server.completion(prompts, n=2, max_tokens=8, **params)
    alone = [server.text_of(each, max_tokens=8, temperature=1.2, seed=7 + i) for each in prompts for i in range(2)]
    assert [each["text"] for each in answer["choices"]] == alone and len(set(alone)) == 4
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
    n_prompt = sum(len(server.engine.tokenizer.encode(each)) for each in prompts)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (n_prompt, 32)
    body: Any = {"prompt": prompts, "n": 2, "max_tokens": 8, "stream": True, **params}
    pieces = [each["choices"][0] for each in events(iter(server.post("/v1/completions", body).text.splitlines()))]
    assert ["".join(each["text"] for each in pieces if each["index"] == i) for i in range(4)] == alone
    chat = {"messages": [{"role": "user", "content": "Hello"}], "n": 2, "max_tokens": 5, **params}
    assert len(server.post("/v1/chat/completions", chat).json()["choices"]) == 2


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 69}, "n"),
        ({"n": True}, "n"),
        ({"prompt": ["a"] * 69}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": ["a", []]}, "prompt"),
        ({"echo": 1}, "echo"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(server: RunningServer, asked: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/completions", {"prompt": PROMPT} | asked)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    eventually(server.is_idle)


def test_texts_beside_a_prompt_that_is_scored_are_what_they_are_alone(server: RunningServer) -> None:
    expected = server.engine.generate(PROMPT, max_new_tokens=60, ignore_eos=True).text
    with ThreadPoolExecutor(3) as clients:
        texts = [clients.submit(server.text_of, PROMPT, max_tokens=60, ignore_eos=True) for _ in range(2)]
        scored = clients.submit(server.completion, LONG, max_tokens=0, logprobs=0, echo=True).result()
        assert [each.result() for each in texts] == [expected] * 2
    logs = reference(server, LONG)
    own = [logs[i, each].item() for i, each in enumerate(LONG[1:])]
    assert scored["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(own, abs=1e-5)
