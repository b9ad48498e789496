"""Two replicas of the demo model under Ray Serve on this machine, one of which is killed while both have work."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_ee import Engine
from tests.server_support import eventually

pytest.importorskip("ray.serve", reason="ray is not installed; pip install 'ray[serve]'")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
N_STREAMS, N_CLIENTS, N_REQUESTS = 6, 6, 60
PASSED_ON_S = 5.0  # until Ray's routers have heard which replica knows a conversation
OPTIONS: dict[str, Any] = {"threads": 1, "profile": "off", "quantizer": "none"}  # nothing to convert


@pytest.fixture(scope="module")
def replicas(demo: Path) -> Iterator[tuple[str, Any]]:
    """Their address and their handle."""
    import ray
    from ray import serve

    from examples.ray_serve import build

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build({"model": str(demo), "options": OPTIONS, "replicas": 2}), name="test")
        yield f"http://127.0.0.1:{port}", serve.get_deployment_handle("Replica", "test")
    finally:
        serve.shutdown()
        ray.shutdown()


def asked(number: int) -> dict[str, Any]:
    n_tokens = 300 if number < N_STREAMS else 30
    return {"prompt": f"Story {number}. Once upon a time", "max_tokens": n_tokens, "seed": number, "ignore_eos": True}


def processes(handle: Any) -> set[int]:
    """Of the replicas, asked until both have answered."""
    return {handle.process.remote().result() for _ in range(50)}


def test_no_request_is_lost_but_streams_of_the_replica_that_dies(replicas: tuple[str, Any], demo: Path) -> None:
    url, handle = replicas
    assert httpx.get(f"{url}/health", timeout=60).json() == {"status": "ok"}
    before = processes(handle)
    assert len(before) == 2
    texts: dict[int, str] = {}
    broken: list[int] = []
    begun = threading.Semaphore(0)

    def streaming(number: int) -> None:
        said = ""
        fields = asked(number) | {"stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=fields, timeout=300) as stream:
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                found = json.loads(line.removeprefix("data: "))
                if "error" in found:
                    broken.append(number)
                    return
                if not said:
                    begun.release()
                said += found["choices"][0]["text"]
        texts[number] = said

    def client(first: int) -> None:
        with httpx.Client(base_url=url, timeout=300) as each:
            for number in range(N_STREAMS + first, N_REQUESTS, N_CLIENTS):
                answer = each.post("/v1/completions", json=asked(number))
                assert answer.status_code == 200, answer.text
                texts[number] = answer.json()["choices"][0]["text"]

    clients = [threading.Thread(target=streaming, args=(number,)) for number in range(N_STREAMS)]
    clients += [threading.Thread(target=client, args=(number,)) for number in range(N_CLIENTS)]
    for each in clients:
        each.start()
    for _ in range(N_STREAMS):
        assert begun.acquire(timeout=120)
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    for each in clients:
        each.join(400)
    assert len(texts) + len(broken) == N_REQUESTS
    assert 0 < len(broken) < N_STREAMS  # those of one replica
    with Engine.from_pretrained(demo, **OPTIONS) as engine:
        for number in list(texts)[::5]:
            fields = asked(number)
            own = {"max_new_tokens": fields["max_tokens"], "seed": number, "ignore_eos": True}
            assert texts[number] == engine.generate(fields["prompt"], **own).text
    eventually(lambda: len(processes(handle) - {victim}) == 2, 120)  # Ray has put another in its place
    print(f"{len(texts)} of {N_REQUESTS} answered, {len(broken)} streams ended with an error")


def test_turns_of_a_conversation_find_their_replica(replicas: tuple[str, Any]) -> None:
    url, _ = replicas
    messages = [{"role": "user", "content": "Once upon a time there was a very small dog who lived in a house."}]
    cached = []
    for turn in range(4):
        time.sleep(PASSED_ON_S if turn == 1 else 0)
        answer = httpx.post(
            f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 12, "temperature": 0}, timeout=60
        ).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages += [answer["choices"][0]["message"] | {"refusal": None}, {"role": "user", "content": "And then?"}]
    assert cached == sorted(cached) and cached[1] > 10
