"""The head in training against the head in use: unrolled over its guesses, it computes what a chain of drafts does."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hetero_ee.hub.config_file import read_spec
from hetero_ee.runtime.batch import Batch
from hetero_ee.speculation.sources.draft_head_file import read_draft_head
from tests.draft_heads import CONFIG, MODEL, BareTarget, draft_head_layer, random_text

SCRIPTS = Path(__file__).parents[2] / "scripts"
N_TOKENS, N_GUESSES = 9, 3
OTHER_ROPE = {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize("rope", [None, OTHER_ROPE])
def test_guesses_in_training_are_those_of_a_chain(
    rope: dict[str, float] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from draft_head_module import TrainingHead

    config = CONFIG | ({} if rope is None else {"rope_parameters": rope})
    torch.manual_seed(4)
    embedding, (tokens, states) = BareTarget().embedding, random_text(N_TOKENS)
    head = TrainingHead(read_spec(config), embedding)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(head.tensors(torch.float32), tmp_path / "model.safetensors")
    layer = draft_head_layer(read_draft_head(tmp_path, MODEL), max_tokens=64)
    with torch.no_grad():
        unrolled = list(head.unrolled(embedding[tokens][None], states[None], N_GUESSES))
    for n_true in range(1, N_TOKENS - N_GUESSES):
        sequence = layer.cache.open_new()
        batch = Batch.of_sequence(sequence, 0, tokens[:n_true])
        state = layer.guess(embedding[tokens[:n_true]], states[:n_true], batch)[-1:]
        for guess in range(N_GUESSES):
            row = n_true - 1 + guess
            torch.testing.assert_close(unrolled[guess][0, row], state[0], rtol=1e-4, atol=1e-4)
            next_row = Batch.of_sequence(sequence, row + 1, tokens[row + 1 : row + 2])
            state = layer.guess(embedding[tokens[row + 1 : row + 2]], state, next_row)
        layer.cache.close(sequence)
