"""The access log: one line per request, of whole answers, streams, refusals and clients that leave."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from hetero_ee import Engine
from hetero_ee.profiling.kept import keep_profile
from hetero_ee_profiles.hardware import MEASURED
from hetero_ee_profiles.reference import reference_profile
from tests.server_support import ENDLESS, RunningServer, eventually, opened, serving

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (\S+) (\S+) (\d+) \d+\.\d{3} s(?:, (\d+) \+ (\d+) tokens)?")
Row = tuple[str, str, int, str | None, str | None]


class Log:
    def __init__(self) -> None:
        self.lines = list[str]()

    def __call__(self, line: str) -> None:
        self.lines.append(line)

    def rows(self, n: int) -> list[Row]:
        """The n lines that come from now on: method, path, status and tokens."""
        eventually(lambda: len(self.lines) >= n)
        found = [LINE.fullmatch(each) for each in self.lines]
        self.lines.clear()
        return [(each[1], each[2], int(each[3]), each[4], each[5]) for each in found if each is not None]


@pytest.fixture(scope="module")
def log() -> Log:
    return Log()


@pytest.fixture(scope="module")
def server(tiny: Path, log: Log) -> Iterator[RunningServer]:
    with opened(tiny) as engine, serving(engine, log=log, api_key="k") as running:
        eventually(lambda: any("/health" in line for line in log.lines))  # by which `serving` saw that it is ready
        yield running


def test_every_request_has_one_line(server: RunningServer, log: Log) -> None:
    log.lines.clear()
    key = {"x-api-key": "k"}
    body = {"prompt": [5] * 9, "max_tokens": 3, "ignore_eos": True}
    server.post("/v1/completions", body, headers=key)
    server.post("/v1/completions", body | {"stream": True, "n": 2}, headers=key)
    server.post("/tokenize", {"content": "a"}, headers=key)
    server.post("/v1/completions", {}, headers=key)
    server.get("/v1/models?key=secret")
    server.get("/%0a404", headers=key)
    assert log.rows(6) == [
        ("POST", "/v1/completions", 200, "9", "3"),
        ("POST", "/v1/completions", 200, "18", "6"),
        ("POST", "/tokenize", 200, None, None),
        ("POST", "/v1/completions", 400, None, None),
        ("GET", "/v1/models", 401, None, None),
        ("GET", "/%0A404", 404, None, None),
    ]


def test_a_client_that_leaves_has_a_line_too(server: RunningServer, log: Log) -> None:
    log.lines.clear()
    body = ENDLESS | {"prompt": "Tom", "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers={"x-api-key": "k"}) as answer:
        next(answer.iter_lines())
    ((method, path, status, n_prompt, n_tokens),) = log.rows(1)
    assert (method, path, status) == ("POST", "/v1/completions", 200)
    assert int(n_prompt or 0) > 0 and 0 < int(n_tokens or 0) < 500


def test_requests_go_on_if_nobody_reads_the_log(tiny: Path) -> None:
    def closed(line: str) -> None:
        raise BrokenPipeError

    with opened(tiny) as engine, serving(engine, log=closed) as running:
        assert running.get("/health").status_code == 200


@pytest.mark.parametrize("doubts", [("others ran",), ()])
def test_a_text_far_above_a_provisional_profile_drops_it_and_the_log_says_so(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doubts: tuple[str, ...]
) -> None:
    """Its predictions are those of a much slower machine."""
    monkeypatch.setenv("HETERO_EE_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("hetero_ee.profiling.expectation.MIN_S", 0.0)
    fast, log = reference_profile("rtx-3060-12gb"), Log()
    hour = replace(fast.cpu[0].overheads[0].layer, value=3600.0, p80=3600.0)
    slow = replace(fast.cpu[0], overheads=tuple(replace(each, layer=hour) for each in fast.cpu[0].overheads))
    profile = replace(fast, cpu=(slow,), gpu=None, link=None, kind=MEASURED, doubts=doubts)
    with Engine.from_pretrained(tiny, threads=1, profile=profile, mode="full") as engine:
        file = keep_profile(tmp_path, profile, engine.spec, quick=True)
        with serving(engine, log=log) as running:
            running.post("/v1/completions", {"prompt": [5] * 9, "max_tokens": 9, "ignore_eos": True})
            eventually(lambda: any("completions" in line for line in log.lines))
            eventually(lambda: not doubts or "It is dropped: the next start measures again" in log.lines[-1])
    assert file.exists() == (not doubts)
