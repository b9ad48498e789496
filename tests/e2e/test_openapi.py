"""The OpenAPI document against the server, by schemathesis: no answer with 500, none that the document lacks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.options.sampling import SAMPLING, SamplingParams
from hetero_ee.serving import app
from hetero_ee.serving.protocols import sampling_fields
from hetero_ee.serving.protocols.openapi import openapi
from tests.server_support import RunningServer, opened, serving

OPERATIONS = sorted((path, method) for path, methods in openapi()["paths"].items() for method in methods)
NOT_DOCUMENTED = ("/", "/page/", "/openapi.json")


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[RunningServer]:
    with opened(tiny, context_tokens=64) as engine, serving(engine, n_slots=8, request_timeout_s=30) as running:
        running.served.usual = SamplingParams(max_new_tokens=3)
        yield running


def test_the_document_has_every_path_and_every_field(server: RunningServer) -> None:
    document = server.get("/openapi.json").json()
    assert document == openapi()
    offered = {path.replace(":path", "") for path in app.GETS if not path.startswith("/page/")} - {*NOT_DOCUMENTED}
    offered |= {path for path, answer in app.POSTS.items() if answer is not app.native.not_offered}
    assert set(document["paths"]) == offered
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    named = set(body["content"]["application/json"]["schema"]["properties"])
    read = {name for option in SAMPLING.values() for name in option.openai}
    assert len(read) > 10 and read <= named and set(sampling_fields.REFUSED) <= named


@pytest.mark.parametrize("n_examples", [pytest.param(6, id="few"), pytest.param(50, id="many", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_request_fails_or_hangs(server: RunningServer, path: str, method: str, n_examples: int) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from hypothesis import HealthCheck, given, settings
    from schemathesis.specs.openapi import checks

    operation = schemathesis.openapi.from_dict(openapi())[path][method.upper()]
    # What fits the schema may still be beyond this model's context or vocabulary, or find the queue full, which is 503.
    unjudged = [checks.positive_data_acceptance, schemathesis.checks.not_a_server_error]
    for mode in schemathesis.GenerationMode:
        if mode is schemathesis.GenerationMode.NEGATIVE and method == "get":
            continue  # there is nothing to say wrong

        @settings(max_examples=n_examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            answer = case.call(base_url=server.url, timeout=20)
            assert answer.status_code < 500 or answer.status_code == 503
            case.validate_response(answer, excluded_checks=unjudged)

        ask()
