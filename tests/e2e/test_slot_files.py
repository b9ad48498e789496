"""Slots saved to files and restored by another server: the same text without prefill, and nothing of other models."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee import Engine
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.kv.gpu import GpuKvCache
from hetero_ee.serving.errors import RequestError
from hetero_ee.serving.slot_files import SlotFiles
from hetero_ee.serving.slots import Slots
from hetero_ee_profiles.reference import reference_profile
from tests.emulation import LAPTOP, prompt_of
from tests.families import random_model, save_checkpoint
from tests.server_support import RunningServer, opened, serving

VOCABULARY = 2048  # of the demo model
PROMPT = "Once upon a time there was a little girl"


@contextmanager
def server(tiny: Path, folder: Path | None, **options: Any) -> Iterator[RunningServer]:
    with (
        opened(tiny, **{"quantizer": "rtn"} | options) as engine,
        serving(engine, n_slots=2, slot_save_path=folder) as running,
    ):
        yield running


def act(server: RunningServer, action: str, name: str | None = "kept", slot: str = "0") -> Any:
    return server.post(f"/slots/{slot}?action={action}", {} if name is None else {"filename": name})


def test_a_restored_slot_continues_as_if_the_server_had_never_ended(tiny: Path, tmp_path: Path) -> None:
    with server(tiny, tmp_path) as first:
        text = first.text_of(PROMPT, max_tokens=6)
        saved = {slot: act(first, "save", slot=slot) for slot in "01"}
        found = next(slot for slot, answer in saved.items() if answer.status_code == 200)
        assert {answer.status_code for answer in saved.values()} == {200, 400}  # one of them is empty
        n_saved = saved[found].json()["n_saved"]
        expected = first.completion(PROMPT + text, max_tokens=12, logprobs=2)
    with server(tiny, tmp_path) as second:
        assert act(second, "restore", slot="1").json()["n_restored"] == n_saved
        said = second.completion(PROMPT + text, max_tokens=12, logprobs=2)
        assert said["choices"] == expected["choices"]
        cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (said, expected)]
        assert cached[0] == cached[1] == n_saved
        assert act(second, "erase", None, slot="1").json()["n_erased"] > n_saved
        assert act(second, "save", slot="1").status_code == 400
        damaged = tmp_path / "damaged"
        damaged.write_bytes((tmp_path / "kept").read_bytes()[:-1] + b"?")
        for name, status, message in (
            ("damaged", 400, "does not match its checksum"),
            ("other", 404, "there is no slot file"),
            ("../kept", 400, "filename is"),
        ):
            answer = act(second, "restore", name)
            assert answer.status_code == status and message in answer.json()["error"]["message"]
        assert act(second, "restore", slot="7").status_code == 404 and act(second, "none").status_code == 400
    with server(tiny, tmp_path, quantizer="nf4") as other:
        answer = act(other, "restore")
        assert answer.status_code == 400 and "made for another model or other weights" in answer.text


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """The demo model split between an emulated GPU and the CPU; its plan chooses 64 tokens and grows on demand."""
    monkeypatch.setattr("hetero_ee.planning.context.USUAL_TOKENS", 64)
    monkeypatch.setattr("hetero_ee.planning.context.FREE", 2.0)
    monkeypatch.setattr("hetero_ee.planning.context.ROUND_TOKENS", 16)
    with demo_engine() as engine:
        yield engine


def demo_engine(context_tokens: int = 0) -> Engine:
    return Engine.from_pretrained(
        threads=1,
        profile=reference_profile(LAPTOP),
        gpu_layers=6,
        emulate=True,
        mode="full",
        context_tokens=context_tokens,
    )


def filled(engine: Engine, token_ids: list[int]) -> Slots:
    """One slot that holds these tokens."""
    executor = engine.executor
    slots = Slots(executor, 1, lambda sequence: executor.cache.close(sequence))
    slot = slots.idle(0)
    assert slot is not None
    slot.sequence, slot.token_ids = executor.cache.open_new(), token_ids
    executor.prompt(prompt_of(executor, slot.sequence, token_ids))
    return slots


def test_a_restored_slot_is_read_again_when_the_plan_changes(growing: Engine, tmp_path: Path) -> None:
    files, kept, other = SlotFiles(growing, tmp_path), list(range(5, 45)), list(range(60, 110))
    slots = filled(growing, kept)
    expected = files.copy(slots, 0)
    slots.free_idle()
    slots = filled(growing, other)
    files.install(slots, 0, expected)
    assert growing.executor.grow(100) >= 100  # a new plan, for which the open sequences are read again
    found = files.copy(slots, 0)
    assert found.token_ids == kept
    assert all((found.layers[layer] == expected.layers[layer]).all() for layer in expected.layers)


def test_a_slot_of_a_grown_context_is_restored_after_a_restart(growing: Engine, tmp_path: Path) -> None:
    kept = [5 + number % 90 for number in range(80)]
    with demo_engine(context_tokens=200) as first:
        expected = SlotFiles(first, tmp_path).copy(filled(first, kept), 0)
        SlotFiles(first, tmp_path).write("kept", expected)
    files, slots = SlotFiles(growing, tmp_path), filled(growing, kept[:9])
    files.install(slots, 0, files.read("kept"))
    found = files.copy(slots, 0)
    assert found.token_ids == kept
    assert all((found.layers[layer] == expected.layers[layer]).all() for layer in expected.layers)


def test_a_slot_whose_tokens_were_lost_holds_none(growing: Engine, tmp_path: Path) -> None:
    slots = filled(growing, list(range(5, 20)))
    for sequence in growing.executor.cache.sequences:  # as after a lost device
        growing.executor.cache.cut(sequence, 0)
    with pytest.raises(RequestError, match="slot 0 holds no tokens"):
        SlotFiles(growing, tmp_path).copy(slots, 0)


@pytest.mark.parametrize("family", ["gemma4-e", "qwen3.5", "lfm2"])
@pytest.mark.sample(1)
def test_layers_with_other_states_are_restored(family: str, demo: Path, tmp_path: Path) -> None:
    """Shared keys and values, and recurrent state."""
    changes = {"vocab_size_per_layer_input": VOCABULARY} if family == "gemma4-e" else {}
    model = save_checkpoint(random_model(family, vocab_size=VOCABULARY, **changes), tmp_path / "m", tokenizer_from=demo)
    with opened(model, quantizer="rtn") as engine:
        files, kept = SlotFiles(engine, tmp_path), list(range(5, 45))
        slots = filled(engine, kept)
        expected = files.copy(slots, 0)
        slots.free_idle()
        files.install(slots, 0, expected)
        found = files.copy(slots, 0)
    assert found.token_ids == kept
    assert all((found.layers[layer] == expected.layers[layer]).all() for layer in expected.layers)


def test_of_a_sliding_window_only_what_is_needed_is_saved(demo: Path, tmp_path: Path) -> None:
    model = random_model("gemma3", vocab_size=VOCABULARY, max_position_embeddings=512)
    with opened(save_checkpoint(model, tmp_path / "m", tokenizer_from=demo), quantizer="rtn") as engine:
        files, kept = SlotFiles(engine, tmp_path), [5 + at % 90 for at in range(400)]
        slots = filled(engine, kept)
        expected = files.copy(slots, 0)
        slots.free_idle()
        files.install(slots, 0, expected)
        found, cache = files.copy(slots, 0), engine.executor.cache
        (sequence,) = cache.sequences
        assert cache.restorable(sequence, 399) == 399 and cache.restorable(sequence, 100) == 0
        cut = slots.idle(0)
        assert cut is not None
        del cut.token_ids[345:]
        with pytest.raises(RequestError, match="slot 0 was cut"):
            files.copy(slots, 0)
    assert all((found.layers[layer] == expected.layers[layer]).all() for layer in expected.layers)
    sizes = {layer.nbytes for layer in expected.layers.values()}
    assert max(sizes) >= 5 * min(sizes)


@pytest.mark.sample(0)
def test_what_can_not_be_saved_is_said(tiny: Path, tmp_path: Path) -> None:
    with server(tiny, None) as found:
        answer = act(found, "save")
        assert answer.status_code == 400 and "--slot-save-path" in answer.text
    with server(tiny, tmp_path, quantizer="none") as found:
        assert "fp32 weights can't be saved" in act(found, "save").text


@pytest.mark.parametrize("kind", ["fp16", "int8"])
@pytest.mark.parametrize(
    "make",
    [
        lambda kind: CpuKvCache(2, 2, 32, 200, [3, 5], kind=kind),
        lambda kind: GpuKvCache((2, 2, 32), 200, "cpu", kind=kind, layers=[3, 5]),
    ],
)
def test_caches_give_back_what_is_stored_in_them(make: Callable[[str], Any], kind: str) -> None:
    cache, like = make(kind), CpuKvCache(2, 2, 32, 200, [3, 5], kind=kind)
    for each in (cache, like):
        each.open(0)
        each.admit(Batch.of_sequence(0, 0, [1] * 130))
    drawn = torch.Generator().manual_seed(1)
    for part in like.stored(5, 0, 0, 130):
        part.copy_(torch.randint(-100, 100, part.shape, generator=drawn))
    cache.store(5, 0, 0, like.stored(5, 0, 0, 130))
    for first, end in ((0, 130), (60, 70)):
        for found, expected in zip(cache.stored(5, 0, first, end), like.stored(5, 0, first, end), strict=True):
            assert torch.equal(found, expected)
    assert all(not part.any() for part in cache.stored(3, 0, 0, 130))
