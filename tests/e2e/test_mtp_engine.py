"""A checkpoint's MTP layer drafts by itself: in Python, in a chat, from a GGUF file and on the command line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine, UsageError
from hetero_ee.planning.plan import SEQUENCE
from tests.command_line import Cli
from tests.emulation import LAPTOP
from tests.mtp_models import knowing_mtp

OPENING = "Once upon a time"


@pytest.fixture(scope="module")
def folder(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid with the demo model's tokenizer and chat template."""
    return made_model(demo, tmp_path_factory.mktemp("mtp") / "hf", "qwen3.5")


def made_model(demo: Path, made: Path, family: str) -> Path:
    knowing_mtp(made, demo, family, vocab_size=2048, max_position_embeddings=512)
    for name in ("chat_template.jinja", "generation_config.json"):
        (made / name).write_bytes((demo / name).read_bytes())
    return made


def opened(folder: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(folder, threads=1, profile=LAPTOP, emulate=True, **options)


@pytest.fixture(scope="module")
def full(folder: Path) -> Iterator[Engine]:
    with opened(folder, mode="full") as engine:
        yield engine


@pytest.fixture(scope="module")
def exact(folder: Path) -> Iterator[Engine]:
    with opened(folder, mode="exact") as engine:
        yield engine


def test_it_is_planned_with_and_drafts_unasked(full: Engine, exact: Engine) -> None:
    check_drafting(full, exact)


def test_one_with_experts_is_planned_with_and_drafts_unasked(demo: Path, tmp_path: Path) -> None:
    folder = made_model(demo, tmp_path / "hf", "qwen3.5-moe")
    with opened(folder, mode="full") as full, opened(folder, mode="exact") as exact:
        check_drafting(full, exact)


def check_drafting(full: Engine, exact: Engine) -> None:
    expected, found = (engine.generate(OPENING, max_new_tokens=60) for engine in (full, exact))
    assert found.token_ids == expected.token_ids
    assert exact.plan is not None and exact.plan.drafts == SEQUENCE and exact.draft_origin == "draft head"
    assert exact.draft_statistics is not None
    (origin,) = [each for each in exact.draft_statistics.origins if each.origin == "draft head"]
    assert origin.n_checked > 10 and origin.precision > 0.3
    assert {term.name for term in exact.plan.memory} >= {"draft head"}


def test_second_turns_are_those_of_full_mode(full: Engine, exact: Engine) -> None:
    """Also with stop strings, and one whose answer is taken back."""
    with full.chat() as plain, exact.chat() as drafting:
        for message, stop in (("Tell me a story.", ()), ("Go on.", ("e",)), ("And then?", ())):
            replies = [
                "".join(t.text for t in chat.send(message, max_new_tokens=20, stop=stop)) for chat in (plain, drafting)
            ]
            assert replies[0] == replies[1]


def test_words_ask_for_it_or_leave_it_out(folder: Path, cache: Path) -> None:
    said = list[str]()
    tell: Any = lambda stage, n_done, n_all: said.append(stage)  # noqa: E731
    with opened(folder, mode="exact", draft_head="draft-mtp", progress=tell) as engine:
        assert engine.plan is not None and engine.plan.drafts == SEQUENCE
    assert any("Checked the model's MTP layer" in each for each in said)
    said.clear()
    with opened(folder, mode="exact", progress=tell) as engine:  # the measured acceptance is kept
        assert engine.plan_request is not None and engine.plan_request.statistics.drafts is not None
        assert engine.plan_request.statistics.drafts.acceptance != (0.75,)
    assert not any("Checked" in each for each in said)
    with opened(folder, draft_head="none") as engine:
        assert engine.plan is not None and engine.plan.mode == "full"
    with pytest.raises(UsageError, match="no MTP layer"):
        Engine.from_pretrained(threads=1, profile=LAPTOP, emulate=True, draft_head="mtp")


def test_the_command_line_knows_it(cli: Cli, folder: Path, tmp_path: Path) -> None:
    planned = cli("plan", folder, "--hardware", LAPTOP, "--mode", "exact")
    assert planned.code == 0 and "Drafts come from the model's MTP layer" in planned.out
    config = tmp_path / "alone"
    config.mkdir()
    (config / "config.json").write_bytes((folder / "config.json").read_bytes())
    on_paper = cli("plan", config, "--hardware", LAPTOP, "--mode", "exact")
    assert "Drafts come from the model's MTP layer" in on_paper.out
    refused = cli("plan", folder, "--hardware", LAPTOP, "--mode", "exact", "--no-own-drafts")
    assert refused.code != 0
    unknown = cli("generate", OPENING, "-m", folder, "--spec-type", "ngram-mod")
    assert unknown.code == 2 and "ngram-mod has no config.json" in unknown.err
