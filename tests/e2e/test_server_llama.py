"""What llama-server's own clients use: /completion, /apply-template and /slots."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server_support import ENDLESS, NAME, RunningServer, eventually, opened, serving, slowed
from tests.tool_templates import HERMES

PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "clock", "description": "Tells the time."}}


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[RunningServer]:
    with opened(tiny) as engine, serving(engine) as running:
        yield running


def completed(server: RunningServer, **fields: Any) -> dict[str, Any]:
    answer = server.post("/completion", GREEDY | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    lines = server.post("/completion", GREEDY | fields | {"stream": True}).text.splitlines()
    return [json.loads(each.removeprefix("data: ")) for each in lines if each.startswith("data: ")]


def test_a_completion_says_what_generate_says(server: RunningServer) -> None:
    said = server.engine.generate(PROMPT, max_new_tokens=12, temperature=0)
    answer = completed(server, n_predict=12, return_tokens=True)
    assert (answer["content"], answer["tokens"]) == (said.text, list(said.token_ids))
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"], answer["index"]) == (True, "limit", "", 0)
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (12, said.n_prompt_tokens)
    assert (answer["model"], answer["prompt"], answer["truncated"]) == (NAME, PROMPT, False)
    assert answer["timings"]["predicted_n"] == 12 and answer["generation_settings"]["n_predict"] == 12
    assert 0 <= answer["id_slot"] < 5 and answer["has_new_line"] == ("\n" in said.text)
    ids = server.engine.tokenizer.encode(PROMPT)
    by_ids = completed(server, n_predict=12, prompt=ids)
    assert (by_ids["content"], by_ids["prompt"], by_ids["tokens"]) == (said.text, PROMPT, [])
    assert by_ids["tokens_cached"] == by_ids["timings"]["cache_n"]


def test_a_completion_streams_the_same(server: RunningServer) -> None:
    whole = completed(server, n_predict=12, return_tokens=True)
    *pieces, last = streamed(server, n_predict=12)
    assert "".join(each["content"] for each in pieces) == whole["content"] and last["content"] == ""
    assert [token for each in (*pieces, last) for token in each["tokens"]] == whole["tokens"]
    assert not any(each["stop"] for each in pieces) and last["stop"] and last["stop_type"] == "limit"
    assert set(last) == set(whole) and last["tokens_predicted"] == 12 and "timings" not in pieces[0]


def test_the_end_of_a_completion_has_a_reason(server: RunningServer) -> None:
    whole = completed(server, n_predict=20)["content"]
    word = completed(server, n_predict=20, stop=[whole[10:13]])
    assert (word["stop_type"], word["stopping_word"]) == ("word", whole[10:13])
    constrained = completed(server, grammar='root ::= "yes"')
    assert (constrained["content"], constrained["stop_type"]) == ("yes", "eos")


@pytest.mark.parametrize("fields", [{"prompt": None}, {"prompt": ["a", "b"]}, {"n_probs": 5}, {"image_data": [1]}])
def test_what_it_can_not_do_is_refused_by_name(server: RunningServer, fields: dict[str, Any]) -> None:
    answer = server.post("/completion", GREEDY | fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(fields))


def test_the_template_is_applied_as_for_a_chat(server: RunningServer, tiny: Path) -> None:
    said = [("system", "Be brief."), ("user", "a</s>b")]
    messages = [{"role": role, "content": text} for role, text in said]
    prompt = server.post("/apply-template", {"messages": messages}).json()["prompt"]
    assert prompt.endswith("system: Be brief.\nuser: a</s>b\nassistant:")
    with opened(tiny) as engine, serving(engine, HERMES) as running:
        asked = {"messages": messages, "tools": [TOOL]}
        assert "Tells the time." in running.post("/apply-template", asked).json()["prompt"]
    assert server.post("/apply-template", {}).json()["error"]["param"] == "messages"


def test_slots_show_what_runs_and_no_text(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    eventually(server.is_idle)
    idle = server.get("/slots").json()
    assert [(each["id"], each["is_processing"]) for each in idle] == [(n, False) for n in range(4)]
    assert {each["n_ctx"] for each in idle} == {600} and {each["speculative"] for each in idle} == {False}
    slowed(server.engine, monkeypatch)
    body = ENDLESS | {"prompt": "xylophone", "stream": True}
    with httpx.stream("POST", f"{server.url}/completion", json=body, timeout=30) as answer:
        pieces = answer.iter_lines()  # whose end would end the answer
        next(pieces)
        text = server.get("/slots").text
        busy = [each for each in json.loads(text) if each["is_processing"]]
        assert "xylophone" not in text and len(busy) == 1 and busy[0]["n_prompt_tokens"] > 0
        assert busy[0]["next_token"][0]["n_decoded"] > 0
