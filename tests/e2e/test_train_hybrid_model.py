"""The hybrids' training script: a few steps on a tiny text give models that load, and its fast forms are right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import l2norm, torch_chunk_gated_delta_rule

from hetero_ee import Engine

SCRIPTS = Path(__file__).parents[2] / "scripts"
STORY = "Once upon a time there was a cat. The cat saw a dog. They had a lot of fun. {}\n<|endoftext|>\n"


@pytest.mark.sample(0)
@pytest.mark.parametrize("experts", ["0", "8"])
def test_a_short_training_exports_a_hybrid_that_runs(experts: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(STORY.format("The end. " * (n % 5)) for n in range(60)))
    arguments = ["--data", str(tmp_path), "--texts", "text.txt", "--output", str(tmp_path / "model"), "--smoke"]
    arguments += ["--num-experts", experts, "--evaluate", str(tmp_path / "text.txt")]
    command = [sys.executable, str(SCRIPTS / "train_hybrid_model.py"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
    assert all(0 < nats < 9 for nats in json.loads(found.stdout)["evaluation"][0]["nats_per_token"])
    with Engine.from_pretrained(tmp_path / "model", quantizer="none") as engine:
        assert engine.generate("Once upon a time", max_new_tokens=5).n_generated_tokens >= 1


@pytest.mark.parametrize("n_tokens", [1, 64, 200])
def test_the_fast_delta_rule_and_its_gradients_are_transformers(n_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from delta_rule import chunked_delta_rule

    torch.manual_seed(n_tokens)
    shape = (2, n_tokens, 3, 16)
    query, value = torch.randn(shape), torch.randn(shape)
    key = torch.randn(2, 1, 3, 16) + 0.3 * torch.randn(shape)  # alike, so that updates depend on each other
    decay, beta = -0.3 * torch.rand(shape[:3]), torch.rand(shape[:3])
    inputs = [x.requires_grad_() for x in (query, key, value, decay, beta)]

    def fast(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        found = [l2norm(query) * 16**-0.5, l2norm(key), value, decay, beta]
        return chunked_delta_rule(*(x.transpose(1, 2) for x in found)).transpose(1, 2)

    expected = torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]
    found = fast(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((x * weights).sum(), inputs) for x in (found, expected)]
    for own, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-3, atol=1e-3)
