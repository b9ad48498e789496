"""The demo model's training script: a few steps on a tiny text give a model that loads and generates."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_ee import Engine

ROOT = Path(__file__).parents[2]
STORY = "Once upon a time there was a cat. The cat saw a dog. They had a lot of fun. {}\n<|endoftext|>\n"


@pytest.mark.sample(0)
def test_a_short_training_exports_a_model_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("".join(STORY.format("The end. " * (n % 5)) for n in range(40)))
    arguments = ["--data", str(tmp_path), "--texts", "text.txt", "--output", str(tmp_path / "model"), "--smoke"]
    command = [sys.executable, str(ROOT / "scripts" / "train_demo_model.py"), *arguments]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True, timeout=300)
    with Engine.from_pretrained(tmp_path / "model", quantizer="none") as engine:
        assert engine.generate("Once upon a time", max_new_tokens=5).n_generated_tokens >= 1
