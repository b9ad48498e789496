"""Opening a model: what is converted and when, and what is refused."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee import Engine, HeteroError, ModelError, SamplingParams, StoreError, UsageError
from hetero_ee.kv.batch import Batch
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.weights.model_weights import expanded
from hetero_ee.weights.store.conversion import CONVERTING
from hetero_ee_profiles.reference import reference_profile
from tests.command_line import stores
from tests.emulation import LAPTOP
from tests.families import edit_config, random_model, save_checkpoint

PROMPT = "Once upon a time"


class Converted:
    """The progress calls of conversions."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def __call__(self, stage: str, n_done: int, n_all: int) -> None:
        if stage == CONVERTING:
            self.calls.append((stage, n_done, n_all))


def tokens(folder: Path, prompt: str = PROMPT, **options: Any) -> tuple[int, ...]:
    with Engine.from_pretrained(folder, threads=1, **options) as engine:
        return engine.generate(prompt, max_new_tokens=20).token_ids


def refusal(folder: Path | str, **options: Any) -> str:
    with pytest.raises(HeteroError) as caught:
        Engine.from_pretrained(folder, **{"quantizer": "none", "threads": 1} | options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("quantizer", ["codebook", "search", "rtn"])
def test_a_model_is_converted_once(tiny: Path, cache: Path, quantizer: str) -> None:
    first, second = Converted(), Converted()
    said = tokens(tiny, quantizer=quantizer, progress=first)
    assert tokens(tiny, quantizer=quantizer, progress=second) == said
    assert second.calls == []
    done = [n_done for _, n_done, _ in first.calls]
    assert done == sorted(done) and done[-1] == first.calls[0][2] > 0
    (store,) = stores(cache)
    for options in ({}, {"quantizer": "none"}, {"quantizer": "rtn"}):  # a store is opened as it is
        again = Converted()
        assert tokens(store, progress=again, **options) == said
        assert again.calls == []
    assert stores(cache) == [store]


def test_int16_activations(tiny: Path, cache: Path) -> None:
    """Their logits are those of plain torch on the same weights, whatever shares a pass."""
    found = {}
    for kind in ("int8", "int16"):
        options: dict[str, Any] = {"profile": reference_profile(LAPTOP), "gpu_layers": 0, "kv_type": "fp32"}
        with Engine.from_pretrained(tiny, threads=2, activations=kind, **options) as engine:
            ids, executor = engine._tokenizer.encode(PROMPT), engine.executor
            found[kind] = prompt_logits(executor, ids)
            alone = [prompt_logits(executor, ids, len(ids) - n) for n in (1, 3)]
            assert all(torch.equal(each, found[kind]) for each in alone)
            reference = ReferenceExecutor(engine.spec, expanded(executor.weights), len(ids))
    expected = prompt_logits(reference, ids)
    errors = {kind: float((logits - expected).square().sum()) for kind, logits in found.items()}
    assert errors["int16"] < 1e-3 * errors["int8"]
    assert "expected one of int8, int16" in refusal(tiny, activations="fp16")


def prompt_logits(executor: Any, ids: list[int], n_first: int = 0) -> torch.Tensor:
    """The last token's logits, after a first pass of n_first tokens if there are any."""
    sequence = executor.cache.open_new()
    parts = [(0, ids[:n_first]), (n_first, ids[n_first:])] if n_first else [(0, ids)]
    for first, some in parts:
        logits: torch.Tensor = executor.logits(Batch.of_sequence(sequence, first, some), [len(some) - 1])
    executor.cache.close(sequence)
    return logits[0]


def test_int4_differs_from_fp32_and_the_default_is_codebook(tiny: Path, cache: Path) -> None:
    by_quantizer = {name: tokens(tiny, quantizer=name) for name in ("none", "rtn", "codebook")}
    assert len(set(by_quantizer.values())) == 3
    assert tokens(tiny) == by_quantizer["codebook"]
    assert len(stores(cache)) == 2


def test_int4_tokens_are_the_same_for_any_threads_and_company(tiny: Path, cache: Path) -> None:
    prompts = [PROMPT, "The", "Lily and Tom went to the park. They saw a big dog and"]
    alone = [tokens(tiny, prompt=prompt) for prompt in prompts]
    for threads in (1, 2, 3):
        with Engine.from_pretrained(tiny, threads=threads) as engine:
            together = engine.generate(prompts, max_new_tokens=20)
        assert [result.token_ids for result in together] == alone


def test_an_engine_names_the_quantizer_of_its_weights(tiny: Path, cache: Path) -> None:
    for quantizer in ("none", "rtn"):
        with Engine.from_pretrained(tiny, quantizer=quantizer, threads=1) as engine:
            assert engine.quantizer == quantizer
    (store,) = stores(cache)
    for asked in ("none", "codebook"):
        with Engine.from_pretrained(store, quantizer=asked, threads=1) as engine:
            assert engine.quantizer == "rtn"


def test_fp32_leaves_nothing_in_the_cache(tiny: Path, empty_cache: Path) -> None:
    tokens(tiny, quantizer="none")
    assert not empty_cache.exists()


def cut_short(store: Path) -> None:
    with (store / "weights.bin").open("r+b") as file:
        file.truncate(1000)


def without_weights(store: Path) -> None:
    (store / "weights.bin").unlink()


def of_another_version(store: Path) -> None:
    manifest = json.loads((store / "manifest.json").read_text())
    (store / "manifest.json").write_text(json.dumps(manifest | {"version": 999}))


def with_half_a_manifest(store: Path) -> None:
    (store / "manifest.json").write_bytes((store / "manifest.json").read_bytes()[:100])


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", [cut_short, without_weights, of_another_version, with_half_a_manifest])
def test_a_damaged_store_in_the_cache_is_made_anew(tiny: Path, cache: Path, damage: Callable[[Path], None]) -> None:
    said = tokens(tiny, quantizer="rtn")
    (store,) = stores(cache)
    damage(store)
    assert "store" in refusal(store)  # a folder the user gave is not the engine's to replace
    repaired, afterwards = Converted(), Converted()
    assert tokens(tiny, quantizer="rtn", progress=repaired) == said
    assert repaired.calls
    assert tokens(tiny, quantizer="rtn", progress=afterwards) == said
    assert afterwards.calls == []
    assert stores(cache) == [store]


def test_a_changed_checkpoint_is_converted_anew(own_tiny: Path, cache: Path) -> None:
    said = tokens(own_tiny, quantizer="rtn")
    os.utime(own_tiny / "model.safetensors", ns=(1, 1))
    touched = Converted()
    assert tokens(own_tiny, quantizer="rtn", progress=touched) == said
    assert touched.calls
    vocab_size = json.loads((own_tiny / "config.json").read_text())["vocab_size"]
    save_checkpoint(random_model("llama", 1, vocab_size=vocab_size, max_position_embeddings=600), own_tiny)
    assert tokens(own_tiny, quantizer="rtn") != said
    edit_config(own_tiny, rms_norm_eps=0.5)
    reconfigured = Converted()
    tokens(own_tiny, quantizer="rtn", progress=reconfigured)
    assert reconfigured.calls
    assert len(stores(cache)) == 4


def test_an_interrupted_conversion_is_gone_on_with(tiny: Path, cache: Path) -> None:
    calls = []

    def interrupt(stage: str, n_done: int, n_all: int) -> None:
        assert stage == CONVERTING
        calls.append(n_done)
        if len(calls) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        tokens(tiny, quantizer="rtn", progress=interrupt)
    (partial,) = stores(cache)
    assert partial.suffix == ".partial"
    assert any("run it again to resume it" in note for note in caught.value.__notes__)
    resumed = Converted()
    said = tokens(tiny, quantizer="rtn", progress=resumed)
    assert resumed.calls[0][1] in calls[-2:]  # what was written before is told at once
    (store,) = stores(cache)
    shutil.rmtree(store)
    assert tokens(tiny, quantizer="rtn") == said


def flipped(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "weights.bin"])
def test_a_store_with_a_flipped_bit_is_refused_and_in_the_cache_made_anew(tiny: Path, cache: Path, name: str) -> None:
    """Before anything of it is read: a configuration that is wrong must not be what the model is opened by."""
    said = tokens(tiny, quantizer="rtn")
    (store,) = stores(cache)
    flipped(store / name, -100)
    message = refusal(store)
    assert "checksum" in message and re.search(r"convert (again|the model again)\.$", message)
    repaired = Converted()
    assert tokens(tiny, quantizer="rtn", progress=repaired) == said and repaired.calls
    assert stores(cache) == [store]


def test_the_models_own_sampling_is_the_default(own_tiny: Path) -> None:
    file = own_tiny / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.5, "top_k": 7, "max_new_tokens": 4}))
    with Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine:
        assert engine.default_sampling == SamplingParams(max_new_tokens=4, temperature=0.5, top_k=7)
        assert engine.generate(PROMPT).n_generated_tokens == 4
        assert engine.generate(PROMPT, max_new_tokens=2).n_generated_tokens == 2
    file.unlink()
    with Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine:
        assert engine.default_sampling == SamplingParams()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "holds a list"),
        (" " * 11_000_000 + "{}", "bytes"),
        ('{"do_sample": true, "temperature": "hot"}', "temperature is 'hot'"),
        ('{"do_sample": true, "top_p": NaN}', "top_p is nan"),
        ('{"do_sample": "yes"}', "do_sample is 'yes'"),
        ('{"repetition_penalty": -1}', "repeat_penalty is -1"),
        ('{"stop_strings": 5}', "stop is 5"),
    ],
    ids=range(9),
)
def test_a_malformed_generation_config_is_refused(own_tiny: Path, content: str, sentence: str) -> None:
    (own_tiny / "generation_config.json").write_text(content)
    message = refusal(own_tiny)
    assert "generation_config.json" in message and sentence in message


def test_a_model_needs_a_tokenizer(own_tiny: Path) -> None:
    (own_tiny / "tokenizer.json").unlink()
    assert "has no tokenizer" in refusal(own_tiny)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"[" * 100_000]
)
def test_a_malformed_tokenizer_is_refused(own_tiny: Path, content: bytes) -> None:
    (own_tiny / "tokenizer.json").write_bytes(content)
    assert f"the tokenizer in {own_tiny} can't be read" in refusal(own_tiny)


@pytest.mark.parametrize("content", [b"{", b"[1]", b'"x"', b"\xff"])
def test_a_malformed_tokenizer_config_is_refused(own_tiny: Path, content: bytes) -> None:
    (own_tiny / "tokenizer_config.json").write_bytes(content)
    assert f"the tokenizer in {own_tiny} can't be read" in refusal(own_tiny)


def test_an_enormous_tokenizer_is_refused_unread(own_tiny: Path) -> None:
    with (own_tiny / "tokenizer.json").open("wb") as file:
        file.truncate(200 * 2**20)
    assert "a tokenizer has at most" in refusal(own_tiny)


def test_a_tokenizer_may_have_more_tokens_than_the_model(own_tiny: Path) -> None:
    """Fine-tunes of Llama 2 have pad tokens that their models don't."""
    save_checkpoint(random_model("llama"), own_tiny)
    vocabulary: dict[str, int] = json.loads((own_tiny / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocabulary) > 131
    with Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine:
        assert engine.generate("a", max_new_tokens=3).n_generated_tokens == 3
        for call in (engine.generate, engine.stream, engine.count_tokens):
            with pytest.raises(ModelError, match=r"the tokenizer gives token \d+, but the model has only 131\."):
                call(PROMPT)


def test_a_token_beyond_the_vocabulary_is_refused(own_tiny: Path) -> None:
    file = own_tiny / "tokenizer.json"
    original = json.loads(file.read_text())
    vocabulary: dict[str, int] = original["model"]["vocab"]
    file.write_text(json.dumps(original | {"model": original["model"] | {"vocab": vocabulary | {"Z": 10**6}}}))
    with (
        Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine,
        pytest.raises(ModelError, match="token 1000000"),
    ):
        engine.generate("Z")


def test_a_tokenizer_never_cuts_the_prompt(own_tiny: Path) -> None:
    file = own_tiny / "tokenizer.json"
    truncation = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": truncation}))
    with Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine:
        assert engine.count_tokens("x " * 50) > 50


def test_a_prompt_without_any_known_token_is_refused(own_tiny: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"cat": 0, "dog": 1}, unk_token=None))  # type: ignore[arg-type]
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(own_tiny / "tokenizer.json"))
    (own_tiny / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine:
        assert engine.generate("cat dog", max_new_tokens=1).n_prompt_tokens == 2
        with pytest.raises(UsageError, match="no token this model knows"):
            engine.generate("  ")


def test_no_code_from_the_folder_is_run(own_tiny: Path) -> None:
    marker = own_tiny / "ran"
    (own_tiny / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    edit_config(own_tiny, auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (own_tiny / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="tokenizer") as caught:
        Engine.from_pretrained(own_tiny, quantizer="none", threads=1)
    assert not marker.exists() and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"quantizer": "int4"}, "expected one of codebook, search, rtn, nf4, int5, int6, int8, none"),
        ({"quantizer": ""}, "expected one of"),
        ({"threads": -1}, "threads is -1"),
        ({"threads": True}, "threads is True"),
        ({"threads": 1.0}, "threads is 1.0"),
        ({"threads": 5000}, "threads is 5000"),
        ({"context_tokens": -1}, "context_tokens is -1"),
        ({"context_tokens": "4k"}, "context_tokens is '4k'"),
        ({"context_tokens": 2**30}, "context_tokens is 1073741824"),
    ],
)
def test_impossible_options_are_refused(tiny: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Engine.from_pretrained(tiny, **options)


def test_learned_positions_bound_the_context(own_tiny: Path) -> None:
    vocab_size = json.loads((own_tiny / "config.json").read_text())["vocab_size"]
    save_checkpoint(random_model("opt", vocab_size=vocab_size), own_tiny)
    assert "beyond the 160 positions" in refusal(own_tiny, context_tokens=161)
    with Engine.from_pretrained(own_tiny, quantizer="none", context_tokens=160, threads=1) as engine:
        assert engine.generate(PROMPT).n_generated_tokens > 100


def test_rotary_positions_may_go_beyond_the_models_own_context(tiny: Path) -> None:
    with Engine.from_pretrained(tiny, quantizer="none", context_tokens=700, threads=1) as engine:
        assert engine.context_tokens == 700


def test_the_manifest_of_a_store_is_read_once(tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Engine.from_pretrained(tiny, quantizer="rtn", threads=1).close()
    (store,) = stores(cache)
    opened, real = [], os.open

    def counted(file: Any, *arguments: Any, **options: Any) -> Any:
        opened.append(Path(file).name)
        return real(file, *arguments, **options)

    monkeypatch.setattr(os, "open", counted)
    Engine.from_pretrained(store, threads=1).close()
    assert opened.count("manifest.json") == 1


def test_a_half_deleted_store_is_made_anew(tiny: Path, cache: Path) -> None:
    expected = tokens(tiny)
    (store,) = stores(cache)
    (store / "manifest.json").unlink()
    assert tokens(tiny) == expected
    assert (store / "manifest.json").exists()


def test_a_cache_folder_that_can_not_be_is_named(tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens(tiny)
    (store,) = stores(cache)
    monkeypatch.setenv("HETERO_EE_CACHE_DIR", "/dev/null/cache")
    with pytest.raises(StoreError, match="HETERO_EE_CACHE_DIR"):
        Engine.from_pretrained(tiny, threads=1)
    said: list[str] = []  # a store needs no cache but for its kernels

    def told(text: str, done: int, in_all: int) -> None:
        if not in_all:
            said.append(text)

    Engine.from_pretrained(store, threads=1, progress=told).close()
    assert ["HETERO_EE_CACHE_DIR" in text for text in said] == [True], said
