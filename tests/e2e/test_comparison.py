"""`hetero-ee eval --compare`: models passed block by block predict as whole models do, and figures add up."""

import json
from pathlib import Path

import pytest
import torch

from hetero_ee.errors import UsageError
from hetero_ee.evaluation.comparison import compare
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.ops.torch_ops import BatchedTorchOps
from hetero_ee.quality.streamed import StreamedModel, opened
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.weights.gguf_checkpoint import open_checkpoint
from hetero_ee.weights.model_weights import load_dense
from hetero_ee.weights.store.library import make_store
from tests.command_line import Cli, complaint
from tests.families import FAMILIES, random_model, save_checkpoint

TEXTS = [[1, 17, 130, 3, 99, 42, 42, 7, 12, 77, 101, 5, 64], [5, 9], [11] * 30]
STORY = "Once upon a time there was a little cat. It had a big red ball and a friend. They played all day.\n"


def reference_logits(folder: Path, texts: list[list[int]]) -> list[torch.Tensor]:
    spec = read_spec(folder)
    executor = ReferenceExecutor(spec, load_dense(open_checkpoint(folder, spec)), 160, BatchedTorchOps())
    found = []
    for text in texts:
        executor.cache.open(0)
        found.append(executor.logits(Batch.of_sequence(0, 0, text, is_prompt=True), range(len(text) - 1)))
        executor.cache.close(0)
    return found


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_blocks_passed_one_by_one_predict_as_the_whole_model(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(random_model(family), tmp_path / "model")
    model = StreamedModel(*opened(folder), TEXTS, map)
    for block in model.layer_blocks():
        model.pass_block(block, model.weights([block]))
    found = list(model.logits(n_tokens=8))
    expected = torch.cat(reference_logits(folder, TEXTS))
    assert [len(targets) for _, targets in found] == [8, 4, 1, 8, 8, 8, 5]
    assert torch.cat([targets for _, targets in found]).tolist() == [token for text in TEXTS for token in text[1:]]
    logits = torch.cat([each for each, _ in found])
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_figures_are_those_of_whole_models(tiny: Path, tmp_path: Path) -> None:
    store = make_store(tiny, cache=tmp_path / "cache", output=tmp_path / "store")
    found = compare(tiny, store, [STORY * 8], n_tokens=120, threads=2)
    again = compare(tiny, store, [STORY * 8], n_tokens=120, threads=1)
    same = compare(store, store, [STORY * 8], n_tokens=120, threads=1)
    assert found == again
    assert same.kl_nats.value == 0 and same.same_top1.value == 1 and same.perplexity_ratio.value == 1
    assert 0 < found.kl_nats.value < found.kl_nats_99 and found.kl_nats.low <= found.kl_nats.value
    ratio = found.perplexity_b.value / found.perplexity_a.value
    assert found.perplexity_ratio.value == pytest.approx(ratio, rel=1e-9) and found.perplexity_b == same.perplexity_a


def test_the_command_prints_a_table_or_a_document(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    store, text = tmp_path / "store", tmp_path / "story.txt"
    text.write_text(STORY * 8)
    assert cli("convert", tiny, "-o", store, "-t", 1).code == 0
    ended = cli("eval", "--compare", tiny, store, "--text", text, "--tokens", 100, "-t", 1)
    assert ended.code == 0, ended.err
    assert "A: tiny, B: store" in ended.out and "KL divergence, nats per token" in ended.out
    found = json.loads(cli("eval", "--compare", tiny, store, "--text", text, "--tokens", 100, "-t", 1, "--json").out)
    assert f"Comparing on {found['n_tokens']} tokens, tiny" in ended.err
    assert found["text"] == "story.txt" and found["kl_nats"]["low"] <= found["kl_nats"]["value"]
    own = json.loads(cli("eval", "--compare", tiny, store, "--tokens", 300, "-t", 1, "--json").out)
    assert own["n_tokens"] > 100 and own["kl_nats"]["value"] > 0


def test_what_cannot_be_compared_is_refused(cli: Cli, tiny: Path, stories260k: Path, tmp_path: Path) -> None:
    text = tmp_path / "story.txt"
    text.write_text(STORY)
    assert "no modes" in complaint(cli("eval", "--compare", tiny, tiny, "--risk", "0.1"), 2)
    assert "leave out --modes" in complaint(cli("eval", "--compare", tiny, tiny, "--modes", "exact"), 2)
    assert "neither model is a store" in complaint(cli("eval", "--compare", tiny, tiny), 2)
    with pytest.raises(UsageError, match="too few tokens"):
        compare(tiny, tiny, ["Hello"])
    with pytest.raises(UsageError, match="vocabularies"):
        compare(tiny, save_checkpoint(random_model("llama"), tmp_path / "other"), [STORY * 40])
