"""`hetero-ee bench` and `simulate` in exact mode: what they report of drafts, and what they refuse."""

import json
import re
from collections.abc import Generator, Sequence
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_ee.hub.config_file import read_spec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan
from hetero_ee.planning.statistics import DraftRates, PromptReading, Statistics
from hetero_ee.speculation.sources.draft_head_file import draft_head_facts, read_draft_head
from hetero_ee.speculation.sources.ngram import NgramSource
from hetero_ee.speculation.sources.source import Choose, Draft
from hetero_ee_profiles.reference import reference_profile
from tests.bench.synthetic_drafts import SyntheticSource, write_synthetic_head
from tests.command_line import Cli
from tests.published_exits import published_statistics

SMALL_MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 3000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}
TINY_BENCH = ["bench", "-p", "4", "-n", "6", "-r", "1", "-t", "1", "--quick"]

pytestmark = pytest.mark.usefixtures("converted_demo")


def test_bench_of_all_modes(cli: Cli, demo: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    ended = cli(*TINY_BENCH, "-d", "0,9", "--mode", "all", "--draft-length", 3, "--stats", "--trace", file, "--json")
    rows = json.loads(ended.out)
    tests = ["pp4", "pp4 @ d9", "tg6", "tg6 @ d9"]
    read_alike = rows[-1]["exit_layer"] > 0  # drafts by exit read no prompt
    assert [(row["mode"], row["test"]) for row in rows] == [
        *(("full", test) for test in tests),
        *(("exact", test) for test in tests[2 if read_alike else 0 :]),
    ]
    for row in rows:
        assert row["predicted_ts"] > 0 and row["avg_ts"] > 0 and len(row["samples_ns"]) == 1
        is_exact = row["mode"] == "exact"
        assert (row["draft_length"], row["exit_layer"] is None) == ((3, False) if is_exact else (1, True))
        drafts = is_exact and row["n_gen"] > 0
        assert (row["acceptance"] is None) != drafts
        assert not drafts or 1 <= row["tokens_per_pass"] <= 3
        assert (row["reading_shares"] is None) != (is_exact and not drafts)
    assert len({row["plan_hash"] for row in rows}) == 2
    assert "tg6, exact\n" in ended.err and "known after layer" in ended.err
    assert json.loads(file.read_text())["traceEvents"]


@pytest.mark.sample(0)
@pytest.mark.parametrize("output", ["md", "csv", "json"])
def test_a_prompt_that_a_draft_head_reads_too(cli: Cli, demo: Path, tmp_path: Path, output: str) -> None:
    spec, profile = read_spec(demo), reference_profile("rtx-4060-laptop-8gb")
    reads = PromptReading(lambda m, context_tokens: 1e-6 * m)
    known = Statistics(drafts=DraftRates("its head", (0.8,), 1e-6, reads))
    made = plan(spec, profile, Limits(context_tokens=700, gpu_layers=0, mode="exact"), known)
    made.save(tmp_path / "plan.json")
    ended = cli(*TINY_BENCH, "-p", 600, "-n", 0, "-d", 0, "--plan", tmp_path / "plan.json", "-o", output)
    shares = re.search(r"draft head[^0-9]+([0-9.e-]+)", ended.out)
    assert ended.code == 0 and shares and 0 < float(shares[1]) < (100 if output == "md" else 1)
    if output == "md":
        assert re.search(r"\| exact \((n-grams \d+%, )?draft head \d+%\) \| pp600 \| [\d.]+ \| [\d.]+ \|", ended.out)


def test_the_table_has_the_mode(cli: Cli, demo: Path) -> None:
    table = cli(*TINY_BENCH, "-p", "0", "--mode", "exact").out
    assert re.search(r"\| exact: [\d.]+ tok/pass, \d+% accepted \| tg6 \| [\d.]+ \| [\d.]+ \|", table)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "--mode", "magic"], "expected one of full, exact, all"),
        (["bench", "--mode", "exact", "--random-weights", "llama-2-7b"], "measure mode full only"),
        (["bench", "--mode", "all", "--random-weights", "llama-2-7b"], "measure mode full only"),
        (["bench", "--plan", "PLAN", "--random-weights", "llama-2-7b"], "measure mode full only"),
        (["bench", "-md", "x", "--random-weights", "llama-2-7b"], "measure mode full only"),
        (["bench", "--mode", "all", "--plan", "PLAN"], "a plan has one mode"),
        (["bench", "--mode", "full", "--plan", "PLAN"], "drop --mode or --plan"),
        (["bench", "--draft-length", "99"], "expected a whole number from 1 to 16"),
        (["bench", "--draft-head", "/dev"], "has no config.json"),
        (["bench", "-ot", "ffn"], "has no '='"),
        (["bench", "--trace", "/"], "name another file"),
        (["simulate", "--random-weights", "llama-2-7b", "--plan", "PLAN"], "random weights produce no text"),
        (["simulate", "--mode", "magic"], "expected one of full, exact"),
        (["simulate", "--draft-length", "0"], "expected a whole number from 1 to 16"),
        (["simulate", "--draft-head", "/dev"], "has no config.json"),
    ],
    ids=range(15),
)
def test_bad_wishes_end_in_one_line(cli: Cli, tmp_path: Path, arguments: list[str], words: str) -> None:
    from hetero_ee.models.known_shapes import known_spec

    spec, profile = known_spec("llama-2-7b"), reference_profile("rtx-4060-laptop-8gb")
    known = Statistics(published_statistics(spec.n_layers))
    made = plan(spec, profile, Limits(context_tokens=512, mode="exact"), known)
    made.save(tmp_path / "plan.json")
    ended = cli(*(tmp_path / "plan.json" if word == "PLAN" else word for word in arguments))
    assert (ended.code, ended.out) == (2, "") and words in ended.err
    assert re.fullmatch(r"hetero-ee: [^\n]+\n", ended.err)


def test_a_plan_too_small_for_the_tests_is_refused(cli: Cli, demo: Path, tmp_path: Path) -> None:
    profile = reference_profile("rtx-4060-laptop-8gb")
    plan(read_spec(demo), profile, Limits(context_tokens=8, gpu_layers=0)).save(tmp_path / "plan.json")
    ended = cli(*TINY_BENCH, "-d", "9", "--plan", tmp_path / "plan.json")
    assert ended.code == 2 and "the plan has a context of 8 tokens and the tests need 15" in ended.err


def test_a_simulation_shows_drafts_beside_what_was_predicted(cli: Cli, demo: Path) -> None:
    arguments = ["simulate", "-n", 24, "-t", 1, "--mode", "exact", "--draft-length", 4]
    document = json.loads(cli(*arguments, "--json").out)
    assert (document["mode"], document["draft_length"]) == ("exact", 4)
    assert document["drafts"]["n_tokens"] == 23 and 1 < document["predicted_tokens_per_pass"] <= 4
    ended = cli(*arguments)
    found = re.search(
        r"\ndrafts +(.+), up to 4 tokens: ([\d.]+) tok/pass, (\d+)% accepted, .+ predicted ([\d.]+) tok/pass", ended.out
    )
    assert found and float(found[2]) == round(document["drafts"]["tokens_per_pass"], 1)
    full = json.loads(cli("simulate", "-n", 24, "-t", 1, "--mode", "full", "--json").out)
    assert full["text"] == document["text"] and full["drafts"] is None
    assert document["generation_s"] < full["generation_s"]


class EndlessSource(NgramSource):
    """Always has another draft."""

    def drafts(self, sequence: int, token_ids: Sequence[int], choose: Choose) -> Generator[Draft]:
        yield from repeat(Draft(0, 0.5))


def _none(logits: Any, history: Sequence[int]) -> int | None:
    return None


def test_synthetic_drafts_of_a_random_head(tmp_path: Path) -> None:
    """A head of EAGLE-1's shape, which everything that reads one takes; its drafts are drawn by position."""
    model = read_spec(SMALL_MODEL)
    rates = DraftRates("drawn", (0.9, 0.5), 0.0)
    write_synthetic_head(tmp_path, model, rates, None)
    assert draft_head_facts(tmp_path, model).acceptance == (0.9, 0.5)
    head = read_draft_head(tmp_path, model)
    text = list(range(2000))
    drawn = SyntheticSource(EndlessSource(), text, rates, 3000)
    found = np.array(
        [[draft.token_id for draft in islice(drawn.drafts(0, text[:n], _none), 3)] for n in range(1, 1900)]
    )
    shares = (found == np.arange(1, 1900)[:, None] + np.arange(3)).mean(0)
    assert head.draft_token_ids is None and np.abs(shares - [0.9, 0.5, 0.5]).max() < 0.05
