"""What the server counts, and where tokens came from, against what was asked and what the engine says of itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine
from tests.emulation import LAPTOP
from tests.server_support import NAME, RunningServer, events, eventually, serving

STORY = "Once upon a time"
ASKED: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_origins": True}
# Suffixes that boards of vLLM and of llama-server look for.
KNOWN = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total"),
    *("generation_tokens_total", "prompt_tokens_cached_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("num_preemptions_total", "request_success_total", "time_to_first_token_seconds_bucket"),
    *("inter_token_latency_seconds_bucket", "request_time_per_output_token_seconds_sum"),
    *("e2e_request_latency_seconds_sum", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
    *("request_decode_time_seconds_sum", "request_inference_time_seconds_sum", "iteration_tokens_total_count"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    *("spec_decode_num_accepted_tokens_per_pos_total", "cache_config_info"),
    *("prompt_seconds_total", "prompt_tokens_seconds", "tokens_predicted_total", "tokens_predicted_seconds_total"),
    *("predicted_tokens_seconds", "requests_processing", "requests_deferred", "n_tokens_max", "n_decode_total"),
    "n_busy_slots_per_decode",
)


@pytest.fixture(scope="module", params=["full", "exact", "specee"])
def server(demo: Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with (
        Engine.from_pretrained(demo, threads=1, profile=LAPTOP, emulate=True, mode=request.param) as engine,
        serving(engine, n_slots=2) as running,
    ):
        yield running


def test_origins_of_tokens_are_those_that_the_engine_counts(server: RunningServer) -> None:
    answer = server.completion(STORY, **ASKED)
    (choice,) = answer["choices"]
    origins = choice["token_origins"]
    assert "".join(each["text"] for each in origins) == choice["text"] and len(origins) == 40
    n_layers, drafts, exits = server.engine.spec.n_layers, server.engine.draft_statistics, server.engine.exit_statistics
    later = origins[1:]  # the prompt's pass gave the first
    assert origins[0]["origin"] == "full" and origins[0]["depth"] == n_layers
    if exits is not None:
        depths = [each["depth"] for each in later]
        assert tuple(depths.count(depth) for depth in range(n_layers + 1)) == exits.depths
        assert min(depths) < n_layers
        assert all((each["origin"] == "exit") == (each["depth"] < n_layers) for each in later)
    elif drafts is not None:
        named = {each.origin: each.n_accepted for each in drafts.origins}
        found = {name: sum(each["origin"] == name for each in later) for name in named}
        assert found == named and sum(named.values()) > 5
        assert sum(each["n_drafted"] for each in later if each["step_index"] == 0) == drafts.n_drafted
        assert answer["timings"]["draft_n"] == drafts.n_drafted
        assert answer["timings"]["draft_n_accepted"] == drafts.n_accepted
    else:
        assert {(each["origin"], each["depth"], each["n_drafted"]) for each in origins} == {("full", n_layers, 0)}
        assert "draft_n" not in answer["timings"]


def test_a_stream_has_them_and_nobody_who_did_not_ask(server: RunningServer) -> None:
    asked = {"prompt": STORY, "stream": True, **ASKED}
    whole = server.completion(STORY, **ASKED)["choices"][0]["token_origins"]
    pieces = [each["choices"][0] for each in events(iter(server.post("/v1/completions", asked).text.splitlines()))]
    told = [token for piece in pieces for token in piece["token_origins"]]
    assert [each["token_id"] for each in told] == [each["token_id"] for each in whole]
    assert ["".join(token["text"] for token in piece["token_origins"]) for piece in pieces[:-1]] == [
        piece["text"] for piece in pieces[:-1]
    ]
    for unasked in (asked | {"return_token_origins": False}, asked | {"return_token_origins": None}):
        assert "token_origins" not in server.post("/v1/completions", unasked).text
    refused = server.post("/v1/completions", asked | {"return_token_origins": "yes"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "return_token_origins"


def test_boards_find_their_names_and_the_counts_are_right(server: RunningServer) -> None:
    before = _metrics(server)
    answer = server.completion(STORY, **ASKED)
    eventually(lambda: _metrics(server)["iteration_tokens_total_sum"] == before["iteration_tokens_total_sum"] + 40)
    after = _metrics(server)
    missing = {name for name in KNOWN if not any(each.startswith(name) for each in after)}
    # Which has no position before a draft was accepted.
    assert missing == ({"spec_decode_num_accepted_tokens_per_pos_total"} if server.engine.drafting is None else set())

    def added(name: str) -> float:
        return after[name] - before[name]

    timings, n_prompt = answer["timings"], answer["usage"]["prompt_tokens"]
    assert added("generation_tokens_total") == added("tokens_predicted_total") == 40
    assert added("prompt_tokens_total") == added("prefix_cache_queries_total") == n_prompt
    assert added("prefix_cache_hits_total") == added("prompt_tokens_cached_total") == timings["cache_n"]
    assert added("spec_decode_num_draft_tokens_total") == timings.get("draft_n", 0)
    assert added("spec_decode_num_accepted_tokens_total") == timings.get("draft_n_accepted", 0)
    by_place = [after[each] - before.get(each, 0) for each in after if "per_pos_total" in each]
    assert sum(by_place) == timings.get("draft_n_accepted", 0)
    assert added("tokens_predicted_seconds_total") == pytest.approx(timings["predicted_ms"] / 1000)
    assert added("prompt_seconds_total") == pytest.approx(timings["prompt_ms"] / 1000)
    n_steps = added("n_decode_total")
    assert added("iteration_tokens_total_count") == n_steps
    assert (
        0 < n_steps < 40 if server.engine.drafting is not None else n_steps >= 40
    )  # a step brings accepted drafts too
    assert added("num_preemptions_total") == added("request_failure_total") == 0
    assert after["n_tokens_max"] == n_prompt + 40 and after["n_busy_slots_per_decode"] == 1
    held = after["kv_cache_usage_perc"] * server.engine.context_tokens
    assert 0 < held < n_prompt + 200


def _metrics(server: RunningServer) -> dict[str, float]:
    """By name and what labels there are beside the model's."""
    found = {}
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("hetero_ee:"):
            name, _, value = line.removeprefix("hetero_ee:").rpartition(" ")
            own = name.replace(f'model_name="{NAME}"', "").replace("{}", "").replace("{,", "{").replace(",}", "}")
            found[own] = float(value)
    return found
