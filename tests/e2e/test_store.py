"""Stores: converted from checkpoints and opened again; whole or not there at all, whatever the disk does."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee.errors import CheckpointError, StoreError
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.conversion import CONVERTING, Quantization, cached_store, convert, planned_bytes
from hetero_ee.weights.filesystem import LocalFileSystem
from hetero_ee.weights.manifest import Entry, Manifest, aligned, read_manifest
from hetero_ee.weights.model_weights import is_quantized
from hetero_ee.weights.store import StoreWriter, _partial_suffix, is_store, open_store
from hetero_ee.weights.weight import LINEAR_CODEBOOK
from tests.families import random_model, save_checkpoint

FAST = Quantization(matrices="rtn")
LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer, and two of the small files that a store gets a copy of."""
    folder = save_checkpoint(random_model("llama", num_hidden_layers=1), tmp_path_factory.mktemp("models") / "tiny")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below the folder; an empty folder counts too."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in found}


class FaultyDisk:
    """The real disk, but call number `fail_at` fails, having done half a write.

    lasting: every call from there on fails. late: the call does its work and fails then.
    """

    def __init__(self, fail_at: int, error: BaseException, *, lasting: bool = False, late: bool = False) -> None:
        self.fail_at, self.error, self.lasting, self.late = fail_at, error, lasting, late
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            now = len(self.calls)
            fails = now >= self.fail_at if self.lasting else now == self.fail_at
            real = getattr(LocalFileSystem(), name)
            if not fails:
                return real(*arguments)
            if name == "write":
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            elif self.late:
                real(*arguments)
            raise self.error

        return call


def fail_everywhere(model_folder: Path, folder: Path, **how: Any) -> int:
    """Converts with a fault in the first call, then in the second, and so on until none is hit. Returns how many."""
    folder.mkdir()
    (folder / "neighbour").write_text("was here")
    before, target = contents(folder), folder / "store"
    spec = ModelSpec.from_hf(model_folder)
    for fail_at in range(1, 1000):
        disk = FaultyDisk(fail_at, **how)
        try:
            convert(model_folder, spec, target, FAST, files=disk)  # type: ignore[arg-type]
        except StoreError as error:
            assert str(folder) in str(error) and str(error).isprintable() and str(error).endswith(".")
        except KeyboardInterrupt:
            assert isinstance(disk.error, KeyboardInterrupt)
        if len(disk.calls) < fail_at:
            break
        if is_store(target):  # then it is whole: its name was given before the fault, and could not be taken back
            assert disk.calls[fail_at - 1] == "rename" if disk.late else disk.lasting
            open_store(target, spec)
            LocalFileSystem().remove_tree(target)
        assert disk.lasting or contents(folder) == before, f"call {fail_at}, {disk.calls[fail_at - 1]}"
    open_store(target, spec)
    left = {name.partition(os.sep)[0] for name in contents(folder)} - {"store", "neighbour"}
    assert disk.lasting or not left  # a disk that also refuses to delete leaves its parts until this process has ended
    assert all(name.startswith(f"store{_partial_suffix()}{os.getpid()}-") for name in left)
    return fail_at - 1


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_a_failing_call_leaves_nothing(model_folder: Path, tmp_path: Path, code: int, late: bool) -> None:
    n_faults = fail_everywhere(model_folder, tmp_path / "disk", error=OSError(code, os.strerror(code)), late=late)
    assert n_faults > 40


def test_a_disk_that_stays_broken_gives_a_store_error(model_folder: Path, tmp_path: Path) -> None:
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    assert fail_everywhere(model_folder, tmp_path / "disk", error=error, lasting=True) > 40


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_an_interrupt_leaves_nothing(model_folder: Path, tmp_path: Path, late: bool) -> None:
    assert fail_everywhere(model_folder, tmp_path / "disk", error=KeyboardInterrupt(), late=late) > 40


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device without room")
@pytest.mark.parametrize("vocab_size", [16, 131], ids=["small", "large"])
def test_a_full_disk_is_noticed_although_writes_are_buffered(tmp_path: Path, vocab_size: int) -> None:
    """Small writes wait in the file's buffer, so that closing it, too, finds the disk full."""
    folder = save_checkpoint(random_model("llama", num_hidden_layers=1, vocab_size=vocab_size), tmp_path / "model")

    class FullDisk(LocalFileSystem):
        def create_file(self, file: Path) -> Any:
            return Path("/dev/full").open("wb")

    with pytest.raises(StoreError, match="No space left"):
        convert(folder, ModelSpec.from_hf(folder), tmp_path / "stores" / "store", FAST, files=FullDisk())
    assert not contents(tmp_path / "stores")


def test_an_interrupt_between_tensors_leaves_nothing(model_folder: Path, tmp_path: Path) -> None:
    spec, n_threads = ModelSpec.from_hf(model_folder), torch.get_num_threads()

    def interrupt(name: str, done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(model_folder, spec, tmp_path / "deep" / "store", FAST, progress=interrupt)
    assert contents(tmp_path).keys() == {"deep"}  # the folder of all stores may stay
    assert torch.get_num_threads() == n_threads


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_a_killed_conversion_leaves_no_store_and_its_remains_are_removed(model_folder: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from hetero_ee.models.spec import ModelSpec\n"
        "from hetero_ee.weights.conversion import Quantization, convert\n"
        f"folder, target = Path({str(model_folder)!r}), Path({str(tmp_path / 'store')!r})\n"
        "die = lambda name, done, total: done > total / 2 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "convert(folder, ModelSpec.from_hf(folder), target, Quantization('rtn'), progress=die)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("store.partial-") and not is_store(left)
    spec = ModelSpec.from_hf(model_folder)
    open_store(convert(model_folder, spec, tmp_path / "store", FAST), spec)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_damaged_checkpoint_leaves_nothing(model_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model_folder / "model.safetensors")
    tensors["model.norm.weight"][7] = float("nan")  # nearly the last one to be converted
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        convert(folder, ModelSpec.from_hf(folder), tmp_path / "stores" / "store", FAST)
    assert not contents(tmp_path / "stores")


def test_the_same_bytes_again_and_for_any_number_of_threads(model_folder: Path, tmp_path: Path) -> None:
    spec = ModelSpec.from_hf(model_folder)
    stores = [
        contents(convert(model_folder, spec, tmp_path / f"{i}", Quantization(), threads=threads))
        for i, threads in enumerate([1, 1, 3])
    ]
    assert stores[0] == stores[1] == stores[2]
    small = {"config.json", "generation_config.json", "tokenizer.json"}
    assert stores[0].keys() == small | {"manifest.json", "weights.bin"}


def test_progress_counts_every_weight_once(model_folder: Path, tmp_path: Path) -> None:
    spec, calls = ModelSpec.from_hf(model_folder), []
    tensors = all_tensors(decoder_blocks(spec))
    convert(model_folder, spec, tmp_path / "store", FAST, progress=lambda *call: calls.append(call))
    total = sum(tensor.n_elements for tensor in tensors)
    done = accumulate(tensor.n_elements for tensor in tensors)
    assert calls == [(CONVERTING, n_done, total) for n_done in done]
    assert calls[-1][1] == total


@pytest.mark.parametrize("matrices", ["rtn", "int8"])
def test_too_little_space_is_refused_before_anything_is_written(
    model_folder: Path, tmp_path: Path, matrices: str
) -> None:
    spec, quantization = ModelSpec.from_hf(model_folder), Quantization(matrices=matrices)
    target = tmp_path / "stores" / "store"

    class SmallDisk(LocalFileSystem):
        def free_bytes(self, folder: Path) -> int:
            return free

    free = planned_bytes(all_tensors(decoder_blocks(spec)), quantization)
    with pytest.raises(StoreError, match="MiB free"):
        convert(model_folder, spec, target, quantization, files=SmallDisk())
    assert not target.parent.exists()
    assert free == (convert(model_folder, spec, target, quantization) / "weights.bin").stat().st_size


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3", "phi3", "opt"])
def test_a_store_holds_the_checkpoint(tmp_path: Path, family: str) -> None:
    """Untied and tied heads, biases, stacked parts, position tables: matrices near, everything else to the bit."""
    folder = save_checkpoint(random_model(family, num_hidden_layers=1), tmp_path / family)
    spec = ModelSpec.from_hf(folder)
    checkpoint = Checkpoint(folder, spec)
    weights = open_store(
        convert(folder, spec, tmp_path / "store", Quantization()), ModelSpec.from_hf(tmp_path / "store")
    )
    assert ("head.tokens" in weights.matrices) != spec.tied_head
    for tensor in checkpoint.tensors():
        original = checkpoint.tensor(tensor.name)
        if is_quantized(tensor.role):
            error = (weights.matrices[tensor.name].dequantize() - original).square().sum() / original.square().sum()
            assert error < (5e-5 if tensor.role.value == "vocabulary" else 0.007), tensor.name
        else:
            assert torch.equal(weights.vectors[tensor.name], original), tensor.name
    assert weights.n_weights == sum(tensor.n_elements for tensor in checkpoint.tensors())


@pytest.fixture
def store(model_folder: Path, tmp_path: Path) -> Path:
    return convert(model_folder, ModelSpec.from_hf(model_folder), tmp_path / "store", FAST)


@pytest.mark.filterwarnings("error")
def test_opening_gives_no_warning_and_outlives_the_folder(store: Path) -> None:
    weights = open_store(store, ModelSpec.from_hf(store))
    before = weights.matrices["layers.0.ffn.down"].dequantize()
    LocalFileSystem().remove_tree(store)
    assert torch.equal(weights.matrices["layers.0.ffn.down"].dequantize(), before)


def test_a_store_is_not_made_twice(model_folder: Path, store: Path) -> None:
    disk = FaultyDisk(0, OSError())
    assert convert(model_folder, ModelSpec.from_hf(model_folder), store, FAST, files=disk) == store  # type: ignore[arg-type]
    assert not disk.calls


def test_a_store_finished_by_another_process_stays(model_folder: Path, store: Path, tmp_path: Path) -> None:
    target = tmp_path / "both"

    class Slow(LocalFileSystem):
        def rename(self, source: Path, target: Path) -> None:
            store.rename(target)  # the other one comes first
            source.rename(target)

    before = contents(store)
    assert convert(model_folder, ModelSpec.from_hf(model_folder), target, FAST, files=Slow()) == target
    assert contents(target) == before and [path.name for path in tmp_path.iterdir()] == ["both"]


def test_two_threads_may_convert_the_same_model(model_folder: Path, tmp_path: Path) -> None:
    """Each writes in a folder of its own; the first to finish gives it the name, and what lies there is whole."""
    spec = ModelSpec.from_hf(model_folder)
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: convert(model_folder, spec, tmp_path / "store", FAST), range(3)))
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert len(set(made)) == 1 and open_store(made[0], spec).n_weights > 0


def test_what_is_no_store_is_never_overwritten(model_folder: Path, tmp_path: Path) -> None:
    spec = ModelSpec.from_hf(model_folder)
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    (folder / "diary.txt").write_text("mine")
    file.write_text("mine too")
    before = contents(tmp_path)
    for target in (folder, file, file / "below"):
        with pytest.raises(StoreError, match="can't be written"):
            convert(model_folder, spec, target, FAST)
    assert contents(tmp_path) == before


def test_leftovers_of_killed_conversions_are_removed(model_folder: Path, tmp_path: Path) -> None:
    """And nothing else is: not another model's, nor a running process's, nor another machine's."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    abandoned = [f"store{_partial_suffix()}{ended.pid}{word}" for word in ("", "-0123abcd")]
    kept = [
        f"other{_partial_suffix()}{ended.pid}-0123abcd",
        f"store{_partial_suffix()}{os.getpid()}-0123abcd",
        f"store{_partial_suffix()}{os.getppid()}-0123abcd",
        f"store.partial-elsewhere-{ended.pid}",
        f"store{_partial_suffix()}notes",
    ]
    for name in (*abandoned, *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.bin").write_bytes(bytes(100))
    convert(model_folder, ModelSpec.from_hf(model_folder), tmp_path / "store", FAST)
    assert {path.name for path in tmp_path.iterdir()} == {"store", *kept}


def test_a_store_of_another_model_is_refused(store: Path) -> None:
    spec = ModelSpec.from_hf(store)
    for changes in ({"ffn_size": 77}, {"tied_head": True}, {"n_layers": 2, "sliding_windows": (None, None)}):
        with pytest.raises(StoreError, match="convert again"):
            open_store(store, replace(spec, **changes))


@pytest.mark.parametrize("name", ["layers.0.ffn.down", "head.tokens", "final_norm.norm"])
def test_missing_and_mistaken_tensors_are_refused(store: Path, name: str) -> None:
    spec, whole = ModelSpec.from_hf(store), read_manifest(store)
    place = next(i for i, entry in enumerate(whole.entries) if entry.name == name)
    entry = whole.entries[place]
    as_numbers = Entry(name, "fp32", (4,) * len(entry.shape), entry.offset, 0, 0, None)
    wrong: list[Entry | None] = [None, replace(entry, name="layers.9.ffn.down"), as_numbers]
    if entry.layout != "fp32":
        wrong += [replace(entry, shape=(entry.shape[0] - 1, entry.shape[1])), replace(entry, shape=(16, 32))]
    for other in wrong:
        entries = (*whole.entries[:place], *([other] if other else []), *whole.entries[place + 1 :])
        (store / "manifest.json").write_bytes(replace(whole, entries=entries).to_json())
        with pytest.raises(StoreError, match=re.escape(f"tensor {name}")):
            open_store(store, spec)


def test_a_surplus_tensor_is_refused(store: Path) -> None:
    whole = read_manifest(store)
    surplus = Entry("more\x1b[2J", "fp32", (5,), aligned(whole.weights_bytes), 0, 0, None)
    with (store / "weights.bin").open("r+b") as file:
        file.truncate(surplus.offset + 20)
    manifest = replace(whole, entries=(*whole.entries, surplus), weights_bytes=surplus.offset + 20)
    (store / "manifest.json").write_bytes(manifest.to_json())
    with pytest.raises(StoreError, match=r"holds 'more\\x1b\[2J', which LlamaForCausalLM does not have"):
        open_store(store, ModelSpec.from_hf(store))


@pytest.mark.parametrize("change", [-1, 1, -4096])
def test_truncated_and_extended_weights_are_refused(store: Path, change: int) -> None:
    with (store / "weights.bin").open("r+b") as file:
        file.truncate((store / "weights.bin").stat().st_size + change)
    with pytest.raises(StoreError, match="its manifest says"):
        open_store(store, ModelSpec.from_hf(store))


def test_missing_weights_are_refused(store: Path) -> None:
    (store / "weights.bin").unlink()
    with pytest.raises(StoreError, match="is missing"):
        open_store(store, ModelSpec.from_hf(store))


def test_an_empty_store_is_refused(store: Path) -> None:
    manifest = replace(read_manifest(store), entries=(), weights_bytes=0)
    (store / "manifest.json").write_bytes(manifest.to_json())
    (store / "weights.bin").write_bytes(b"")
    with pytest.raises(StoreError, match=r"weights\.bin"):
        open_store(store, ModelSpec.from_hf(store))


def test_conversion_holds_one_tensor_at_a_time(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read from the checkpoint, and what is made of it, is gone when the next tensor is read."""
    alive: list[weakref.ref[Any]] = []
    read, write = Checkpoint.tensor, StoreWriter.add_tiles

    def watched_read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
        assert not any(reference() is not None for reference in alive)
        values = read(checkpoint, name)
        alive.append(weakref.ref(values))
        return values

    def watched_write(writer: StoreWriter, name: str, weight: Any) -> None:
        alive.append(weakref.ref(weight.tiles))
        write(writer, name, weight)

    monkeypatch.setattr(Checkpoint, "tensor", watched_read)
    monkeypatch.setattr(StoreWriter, "add_tiles", watched_write)
    convert(model_folder, ModelSpec.from_hf(model_folder), tmp_path / "store", Quantization())
    assert len(alive) == 3 + 2 * 6  # norms, and matrices with their tiles


def test_the_cache_tells_models_and_quantizers_apart(model_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "a model: \u00e9"
    shutil.copytree(model_folder, copy)
    first = cached_store(copy, FAST, tmp_path / "cache")
    assert first == cached_store(copy, FAST, tmp_path / "cache") and first.parent == tmp_path / "cache" / "stores"
    assert re.fullmatch(r"a_model__\u00e9-rtn-[0-9a-f]{16}", first.name)
    assert cached_store(copy, Quantization(), tmp_path / "cache") != first
    weights = copy / "model.safetensors"
    os.utime(weights, ns=(1, weights.stat().st_mtime_ns + 1))
    assert cached_store(copy, FAST, tmp_path / "cache") != first


def hollow_store(folder: Path, spec: ModelSpec) -> Path:
    """A store in the right shape whose weights.bin is a hole: nothing on the disk, and every weight 0."""
    entries, end = [], 0
    for tensor in all_tensors(decoder_blocks(spec)):
        layout = {"matrix": "int4", "vocabulary": "int8"}.get(tensor.role.value, "fp32")
        codebook = LINEAR_CODEBOOK if layout == "int4" else None
        entry = Entry(tensor.name, layout, tensor.shape, aligned(end), 0, 0, codebook)
        if layout != "fp32":
            entry = replace(entry, scales_offset=aligned(entry.offset + entry.data_bytes))
        entries.append(entry)
        end = sum(entry.regions[-1])
    folder.mkdir()
    (folder / "manifest.json").write_bytes(Manifest("codebook", "int8", {}, end, "0" * 64, tuple(entries)).to_json())
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(end)
    return folder


def test_a_store_of_7b_opens_at_once(tmp_path: Path) -> None:
    spec = ModelSpec.from_hf(LLAMA_7B)
    folder = hollow_store(tmp_path / "7b", spec)
    began = time.perf_counter()
    weights = open_store(folder, spec)
    elapsed_s = time.perf_counter() - began
    print(f"opened {weights.n_bytes / 2**30:.2f} GiB, {weights.n_weights / 1e9:.2f} G weights, in {elapsed_s:.3f} s")
    assert elapsed_s < 5
    assert weights.n_weights == 6_738_415_616
    assert torch.equal(weights.matrices["head.tokens"].rows(torch.tensor([31_999])), torch.zeros(1, 4096))


def test_a_store_larger_than_memory_opens(tmp_path: Path) -> None:
    """What is never read needs no memory: a part of the weights may be on its way to a GPU, layer by layer."""
    import psutil

    spec = ModelSpec.from_hf(LLAMA_7B | {"num_hidden_layers": 1000})
    folder = hollow_store(tmp_path / "huge", spec)
    size = (folder / "weights.bin").stat().st_size
    if size < psutil.virtual_memory().total + psutil.swap_memory().total:
        pytest.skip(f"this machine has more memory than the {size / 2**30:.0f} GiB of the largest store made here")
    assert open_store(folder, spec).n_bytes > 0.99 * size
