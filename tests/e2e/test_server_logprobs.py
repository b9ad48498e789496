"""Log-probabilities as OpenAI's own client reads them, held to logits of the engine's executor."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from hetero_ee import Engine, SamplingParams
from hetero_ee.decoding.requests import Ending
from hetero_ee.decoding.scoring import score
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.stop_rule import FixedThreshold
from tests.draft_sources import ScriptedSource, oracle
from tests.exact_cases import Run, check_identity
from tests.server_support import NAME, RunningServer, events, opened, serving

PROMPT = "Once upon a time"
SAMPLED: Any = {"model": NAME, "temperature": 1.5, "top_p": 0.9, "seed": 3, "extra_body": {"repeat_penalty": 1.3}}


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[RunningServer]:
    with opened(tiny) as engine, serving(engine) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def reference(engine: Engine, ids: list[int], n_prompt: int) -> torch.Tensor:
    """(tokens after the prompt, vocab), by torch."""
    return torch.stack([torch.log_softmax(row.double(), 0) for row, _ in score(engine.executor, ids, n_prompt)])


def generated(engine: Engine, ids: list[int]) -> list[int]:
    changes: Any = {key: SAMPLED[key] for key in ("temperature", "top_p", "seed")} | {"repeat_penalty": 1.3}
    return list(engine.generate(ids, max_new_tokens=12, **changes).token_ids)


def test_a_completion_has_those_of_the_models_own_distribution(client: openai.OpenAI, server: RunningServer) -> None:
    engine, ids = server.engine, server.engine.tokenizer.encode(PROMPT)
    said = generated(engine, ids)
    logs = reference(engine, [*ids, *said], len(ids))
    (choice,) = client.completions.create(prompt=PROMPT, max_tokens=12, logprobs=3, **SAMPLED).choices
    found = choice.logprobs
    assert found is not None and found.tokens == [engine.tokenizer.token_text(each) for each in said]
    own = [row[each].item() for row, each in zip(logs, said, strict=True)]
    assert found.token_logprobs == pytest.approx(own, abs=1e-6)
    assert found.text_offset is not None and found.text_offset[0] == 0
    assert found.text_offset == sorted(found.text_offset) and found.text_offset[-1] <= len(choice.text)
    for row, each, top in zip(logs, said, found.top_logprobs or [], strict=True):
        best = row.topk(3).indices.tolist()
        expected = {engine.tokenizer.token_text(one): row[one].item() for one in [each, *best[::-1]]}
        assert top == pytest.approx(expected, abs=1e-6)


def test_a_chat_has_the_same_in_its_own_shape(client: openai.OpenAI, server: RunningServer) -> None:
    engine, ids = server.engine, server.chat_ids(("user", "Hello"))
    said = generated(engine, ids)
    logs = reference(engine, [*ids, *said], len(ids))
    asked: Any = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "logprobs": True} | SAMPLED
    (choice,) = client.chat.completions.create(top_logprobs=2, **asked).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    for row, token_id, found in zip(logs, said, choice.logprobs.content, strict=True):
        assert found.token == engine.tokenizer.token_text(token_id)
        assert found.logprob == pytest.approx(row[token_id].item(), abs=1e-6)
        assert [each.logprob for each in found.top_logprobs] == pytest.approx(row.topk(2).values.tolist(), abs=1e-6)
        assert found.bytes is None or bytes(found.bytes).decode() == found.token
    chunks = list(client.chat.completions.create(top_logprobs=2, stream=True, **asked))
    streamed = [one for each in chunks if (p := each.choices[0].logprobs) is not None for one in p.content or ()]
    assert [each.model_dump() for each in streamed] == [each.model_dump() for each in choice.logprobs.content]
    (bare,) = client.chat.completions.create(**asked).choices
    assert bare.logprobs is not None and {len(each.top_logprobs) for each in bare.logprobs.content or ()} == {0}


def test_a_streamed_completion_has_the_same(server: RunningServer) -> None:
    asked: Any = {"max_tokens": 12, "logprobs": 2}
    whole = server.completion(PROMPT, **asked)["choices"][0]["logprobs"]
    answer = server.post("/v1/completions", {"prompt": PROMPT, "temperature": 0, "stream": True} | asked)
    pieces = [each["choices"][0]["logprobs"] for each in events(iter(answer.text.splitlines()))]
    assert {key: [one for each in pieces if each for one in each[key]] for key in whole} == whole


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
        ("/v1/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": 2}, "logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_what_they_can_not_be_is_refused_by_name(
    server: RunningServer, path: str, asked: dict[str, Any], param: str
) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    answer = server.post(path, {"prompt": PROMPT, "messages": messages} | asked)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_exact_mode_has_those_of_full_mode(server: RunningServer) -> None:
    engine = server.engine
    prompts = [engine.tokenizer.encode(text) for text in (PROMPT, "Tom had a dog.")]
    params = SamplingParams(24, temperature=0.9, seed=5, logprobs=2)
    run = Run(engine, prompts, params, Ending(frozenset(), engine.context_tokens))
    full = run.full()
    texts = [[*ids, *(each.token_id for each in said)] for ids, said in zip(prompts, full, strict=True)]
    source = ScriptedSource(oracle(texts, error_rate=0.3), engine.spec.hidden_size)
    check_identity(full, run.exact(Drafting(0, 4, FixedThreshold(0.0), None, (source,))))
    assert source.n_drafts > 10 and all(len(each.logprobs.top) == 2 for said in full for each in said if each.logprobs)
