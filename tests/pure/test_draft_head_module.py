"""The head in training against the head in use: unrolled over its guesses, it computes what a chain of drafts does."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.speculation.sources.draft_head import StateRows
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


@pytest.mark.parametrize("token_ids", [None, [3, 5, 8, 60]])
def test_guesses_of_eagle_3_likewise(
    token_ids: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from eagle3_module import Eagle3TrainingHead

    torch.manual_seed(4)
    target, (tokens, states) = BareTarget(), random_text(N_TOKENS)
    captured = [states, 2 * states.flip(0), 3 * states.flip(1)]
    rows = target.head if token_ids is None else target.head[token_ids]
    head = Eagle3TrainingHead(MODEL, target.embedding, len(captured), rows, token_ids)
    config = CONFIG | {"architectures": ["Eagle3LlamaForCausalLM"], "fc_norm": True}
    (tmp_path / "config.json").write_text(json.dumps(config | ({"draft_token_ids": token_ids} if token_ids else {})))
    save_file(head.tensors(torch.float32), tmp_path / "model.safetensors")
    read = read_draft_head(tmp_path, MODEL)
    layer, held = draft_head_layer(read, max_tokens=64), StateRows()
    assert token_ids == (None if read.draft_token_ids is None else read.draft_token_ids.tolist())
    layer.keep(states, captured, held.put)
    with torch.no_grad():
        unrolled = list(head.unrolled(target.embedding[tokens][None], torch.cat(captured, -1)[None], N_GUESSES))
        scores = head.scores(unrolled[0], target.head)
    for n_true in range(1, N_TOKENS - N_GUESSES):
        sequence = layer.cache.open_new()
        batch = Batch.of_sequence(sequence, 0, tokens[:n_true])
        state = layer.guess(target.embedding[tokens[:n_true]], held.rows(0, n_true), batch)[-1:]
        logits = rows @ layer.normed(state)[0]
        torch.testing.assert_close(scores[0, n_true - 1], logits, rtol=1e-3, atol=2e-3)  # fp16 keys
        for guess in range(N_GUESSES):
            row = n_true - 1 + guess
            torch.testing.assert_close(unrolled[guess][0, row], state[0], rtol=1e-3, atol=1e-3)
            next_row = Batch.of_sequence(sequence, row + 1, tokens[row + 1 : row + 2])
            state = layer.guess(target.embedding[tokens[row + 1 : row + 2]], state, next_row)
        layer.cache.close(sequence)
