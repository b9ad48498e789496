"""`hetero-ee eval`: the table, the document, the picture, and one sentence for whatever is wrong."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine, SamplingParams
from hetero_ee.decoding.scoring import score
from hetero_ee.evaluation.open_mode import EngineMode
from hetero_ee.kv.batch import Batch
from hetero_ee.planning.limits import Limits
from hetero_ee_profiles.reference import reference_profile
from tests.command_line import Cli, complaint
from tests.emulation import LAPTOP

SHORT = ["--prompts", 2, "--prompt-tokens", 4, "-n", 8, "-t", 1]
STORIES = "Once upon a time there was a little cat. It had a big red ball and a friend.\n<|endoftext|>\n" * 4
FIGURES = {"identity", "perplexity", "kl_nats", "doubled_words", "mean_depth", "cpu_passes_per_token", "tokens_per_s"}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "stories.txt"
    file.write_text(STORIES)
    return file


def test_full_mode_alone_needs_no_plan(cli: Cli, tiny: Path, text: Path) -> None:
    ended = cli("eval", tiny, "--text", text, "--modes", "full", *SHORT)
    assert ended.code == 0
    title, head, row = ended.out.splitlines()
    assert title == "tiny, 2 texts of 8 tokens, stories.txt"
    assert head.split()[:3] == ["tokens/s", "x", "full"] and "emulated" not in head
    assert re.match(r"full +[\d.]+ (\N{PLUS-MINUS SIGN}[\d.]+)? +1\.00 +100\.0% +8\.0 +[\d.]+", row)
    assert "half of the 95 % interval" in ended.err


def test_the_document_has_every_figure(cli: Cli, tiny: Path, text: Path) -> None:
    found = json.loads(cli("eval", tiny, "--text", text, "--modes", "full", "--json", *SHORT).out)
    assert found["schema"] == 2 and found["text"] == "stories.txt" and found["emulated"] is None
    (full,) = found["modes"]
    assert full.keys() >= FIGURES and full["name"] == "full" and full["first_divergences"] == [None, None]
    assert full["perplexity"]["low"] <= full["perplexity"]["value"] <= full["perplexity"]["high"]
    assert full["identity"] == {"value": 1.0, "low": 1.0, "high": 1.0} and full["kl_nats"]["value"] == 0.0
    assert full["mean_depth"]["value"] == full["scored_mean_depth"]["value"] == 3.0
    assert full["emulated_tokens_per_s"] is None and full["cpu_passes_per_token"]["value"] == 1.0


def test_exact_and_early_exit_modes_side_by_side(
    cli: Cli, converted_demo: None, text: Path, tmp_path: Path, matplotlib: None
) -> None:
    picture, common = tmp_path / "modes.svg", ["--hardware", LAPTOP, "-ngl", 6, "--text", text, *SHORT]
    ended = cli("eval", *common, "--modes", "exact,specee,calm", "--plot", picture, "--json")
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["emulated"] == LAPTOP
    modes = {each["name"]: each for each in document["modes"]}
    assert list(modes) == ["full", "exact", "specee", "calm"]
    exact, specee = modes["exact"], modes["specee"]
    assert exact["identity"]["value"] == 1.0 and exact["kl_nats"]["value"] == 0.0
    assert exact["perplexity"] == modes["full"]["perplexity"] and exact["cpu_passes_per_token"]["value"] < 1
    assert specee["mean_depth"]["value"] < 12 and specee["cpu_passes_per_token"]["value"] < 1
    assert specee["kl_nats"]["value"] > 0 and specee["emulated_tokens_per_s"]["value"] > 0
    lines = picture.read_text().splitlines()
    drawn = [f"{name} 1" for name, each in modes.items() if "reason" not in each]
    assert lines[0] == "svg" and [line for line in lines[1:] if not line.startswith("at ")] == drawn


def test_a_mode_that_can_not_run_is_left_out(cli: Cli, tiny: Path, text: Path) -> None:
    ended = cli("eval", tiny, "--text", text, "--hardware", LAPTOP, *SHORT, "--json")
    full, exact = json.loads(ended.out)["modes"]
    assert ended.code == 0 and full["name"] == "full" and exact["reason"] in ended.err.replace("\n", " ")
    assert "exact is left out: exact mode needs a model whose drafts were measured" in ended.err


def test_without_a_text_full_mode_writes_one(cli: Cli, tiny: Path) -> None:
    arguments = ["eval", tiny, "--prompts", 3, "-n", 8, "-t", 1, "--modes", "full", "--json", "--seed"]
    first, again, other = (json.loads(cli(*arguments, seed).out) for seed in (1, 1, 2))
    assert first["text"] == "texts of the model's own" and first["n_prompts"] == 3
    figures = [each["modes"][0]["perplexity"]["value"] for each in (first, again, other)]
    assert figures[0] == figures[1] != figures[2]


def test_the_text_may_come_from_standard_input(cli: Cli, tiny: Path) -> None:
    ended = cli("eval", tiny, "--text", "-", "--modes", "full", *SHORT, stdin=STORIES.encode())
    assert ended.code == 0 and ended.out.startswith("tiny, 2 texts of 8 tokens, standard input\n")


BAD: dict[str, tuple[list[Any], str]] = {
    "no such mode": (
        ["--modes", "full,exactly"],
        "--modes is 'full,exactly' and 'exactly' is none; did you mean exact?",
    ),
    "no mode": (["--modes", ""], "'' is none; there are full, exact, specee"),
    "a risk of no mode": (["--risk", "0.05"], "--risk is of mode certified; drop it"),
    "a risk that is none": (["--modes", "certified", "--risk", "small"], "--risk is 'small'; expected shares"),
    "a risk that is no number": (["--modes", "certified", "--risk", "nan"], "--risk is nan; expected a share"),
    "a risk out of range": (["--modes", "certified", "--risk", "0.01,1.5"], "--risk is 1.5; expected a share"),
    "no such text": (["--text", "nothing.txt"], "nothing.txt can't be read"),
    "an empty text": (["--text", "empty.txt"], "makes 0 chunks of 24 to 24 tokens and --prompts is 16"),
    "a text too short": (["--text", "stories.txt"], "give a longer text, or lower --prompts or --prompt-tokens."),
    "a text that is none": (["--text", "binary.txt"], "is not UTF-8 text at byte 0"),
    "too many openings": (["--prompts", "99"], "--prompts is 99 and there are 16 openings; lower it, or give a text."),
    "too small a context": (["--prompts", "2", "-c", "9"], "-c / --ctx-size is 9 and the texts have"),
    "a picture of another kind": (["--plot", "modes.jpg"], "expected a name that ends in .png or .svg"),
    "no such hardware": (["--hardware", "abacus"], "is not a shipped profile"),
    "two machines": (["--hardware", LAPTOP, "--profile", "off"], "drop one of them"),
    "a plan while there is none": (["--prompts", "2", "-ngl", "2"], "and profile is off"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_can_not_be_is_refused_in_one_sentence(
    cli: Cli, tiny: Path, text: Path, name: str, monkeypatch: pytest.MonkeyPatch, matplotlib: None
) -> None:
    monkeypatch.chdir(text.parent)
    Path("empty.txt").touch()
    Path("binary.txt").write_bytes(b"\xff\xfe")
    arguments, says = BAD[name]
    assert says in complaint(cli("eval", tiny, "-n", 8, "-t", 1, *arguments), 2)


def test_a_picture_without_matplotlib_is_refused_before_the_work(
    cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "hetero-ee[plot]" in complaint(cli("eval", tiny, "--plot", "x.png"), 2)


def test_ctrl_c_between_modes_leaves_nothing(
    cli: Cli, converted_demo: None, text: Path, monkeypatch: pytest.MonkeyPatch, matplotlib: None
) -> None:
    opened: list[Engine] = []

    def begin(mode: EngineMode, engine: Engine, *, emulates: bool) -> None:
        opened.append(engine)
        if len(opened) > 1:
            raise KeyboardInterrupt
        keep(mode, engine, emulates=emulates)

    keep = EngineMode.__init__
    monkeypatch.setattr(EngineMode, "__init__", begin)
    monkeypatch.setattr("hetero_ee_cli.app.leave", sys.exit)
    monkeypatch.chdir(text.parent)
    before = sorted(Path().iterdir())
    ended = cli("eval", "--hardware", LAPTOP, "--text", text, *SHORT, "--plot", "x.png", "--json")
    assert (ended.code, ended.out) == (130, "") and len(opened) == 2
    assert all("closed" in repr(engine) for engine in opened)
    assert sorted(Path().iterdir()) == before


# What the library's part asks of an engine.


@pytest.mark.parametrize("n_prompt", [1, 5, 9, 19])
def test_scores_in_chunks_are_those_of_one_pass(tiny: Path, n_prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [(7 * place) % 90 + 3 for place in range(20)]
    with Engine.from_pretrained(tiny, threads=1, profile="off") as engine:
        executor = engine.executor
        sequence = executor.cache.open_new()
        wanted = executor.logits(Batch.of_sequence(sequence, 0, ids[:-1]), range(n_prompt - 1, 19))
        executor.cache.close(sequence)
        monkeypatch.setattr(executor, "prompt_chunk_tokens", 4)
        found = list(score(executor, ids, n_prompt))
        assert [depth for _, depth in found] == [3] * (20 - n_prompt) and not executor.cache.sequences
    assert all(one.equal(other) for (one, _), other in zip(found, wanted, strict=True))


def test_an_early_exit_mode_scores_with_exits(converted_demo: None) -> None:
    profile = reference_profile(LAPTOP)
    limits = Limits(mode="specee", gpu_layers=6, context_tokens=64)
    with Engine.from_pretrained(threads=1, profile=profile, limits=limits, emulate=True) as engine:
        mode = EngineMode(engine, emulates=True)
        text = engine.generate("Once upon a time", max_new_tokens=16).token_ids
        depths = [depth for _, depth in mode.score([1, *text], 1)]
        ids = engine._tokenizer.encode("Once upon a time")
        written = mode.generate(ids, SamplingParams(max_new_tokens=40, ignore_eos=True))
        spoilt = [7 if place in (5, 20) else token_id for place, token_id in enumerate(written.token_ids)]
        written = replace(written, token_ids=tuple(spoilt))
        whole, sequence = [*ids, *written.token_ids], engine.executor.cache.open_new()
        said = engine.executor.logits(Batch.of_sequence(sequence, 0, whole), range(len(ids) - 1, len(whole) - 1))
        expected = said.argmax(-1).tolist()
        n_changed = sum(ours != full for ours, full in zip(written.token_ids, expected, strict=True))
        assert mode.n_changed(ids, written) == n_changed >= 2
    assert len(depths) == len(text) and min(depths) < max(depths) == engine.spec.n_layers
