"""Stores: converted from checkpoints and opened again."""

import json
import os
import re
import shutil
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hetero_ee.errors import StoreError
from hetero_ee.hub.config_file import read_config_file, read_spec
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import is_quantized
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.quantizers import Workers
from hetero_ee.weights.store import source
from hetero_ee.weights.store.conversion import CONVERTING, cached_store, convert, planned_bytes
from hetero_ee.weights.store.filesystem import FileSystem
from hetero_ee.weights.store.manifest import FORMAT_VERSION, Entry, Manifest, aligned, read_manifest
from hetero_ee.weights.store.reader import open_store
from hetero_ee.weights.store.writer import StoreWriter
from hetero_ee.weights.weight import LINEAR_CODEBOOK
from hetero_ee_profiles.host.memory import MemoryInfo
from tests.families import random_model, save_checkpoint
from tests.store_support import FAST, contents, made_store, one_layer_model

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
    return one_layer_model(tmp_path_factory.mktemp("models") / "tiny")


def test_the_same_bytes_again_and_for_any_number_of_threads(model_folder: Path, tmp_path: Path) -> None:
    spec = read_spec(model_folder)
    stores = [
        contents(convert(model_folder, spec, tmp_path / f"{i}", Quantization(), threads=threads))
        for i, threads in enumerate([1, 1, 3])
    ]
    assert stores[0] == stores[1] == stores[2]
    small = {"config.json", "generation_config.json", "tokenizer.json"}
    assert stores[0].keys() == small | {"manifest.json", "weights.bin"}


def test_progress_counts_every_byte_once(model_folder: Path, tmp_path: Path) -> None:
    spec, calls = read_spec(model_folder), []
    store = convert(model_folder, spec, tmp_path / "store", FAST, progress=lambda *call: calls.append(call))
    total = (store / "weights.bin").stat().st_size
    ends = [entry.regions[-1].end for entry in read_manifest(store).entries]
    assert calls == [(CONVERTING, n_done, total) for n_done in ends]
    assert calls[-1][1] == total


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs Linux's huge pages")
@pytest.mark.parametrize("fits", [True, False])
def test_a_store_that_fits_in_free_ram_asks_for_huge_pages(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    store = convert(model_folder, spec := read_spec(model_folder), tmp_path / "store", FAST)
    n_bytes = (store / "weights.bin").stat().st_size
    found = MemoryInfo(2**40, n_bytes + fits, 0, None, None)
    monkeypatch.setattr("hetero_ee.weights.store.reader.memory_info", lambda host: found)
    weights = open_store(store, spec)
    about = Path("/proc/self/smaps").read_text().split(str(store / "weights.bin"))[1]
    flags = next(line for line in about.splitlines() if line.startswith("VmFlags:")).split()
    assert weights.matrices and ("hg" in flags) == fits


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3", "phi3", "opt"])
def test_a_store_holds_the_checkpoint(tmp_path: Path, family: str) -> None:
    """Untied and tied heads, biases, stacked parts, position tables: matrices near, everything else to the bit."""
    folder = save_checkpoint(random_model(family, num_hidden_layers=1), tmp_path / family)
    spec = read_spec(folder)
    checkpoint = Checkpoint(folder, spec)
    weights = open_store(convert(folder, spec, tmp_path / "store", Quantization()), read_spec(tmp_path / "store"))
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
    return made_store(model_folder, tmp_path / "store")


@pytest.mark.filterwarnings("error")
def test_opening_gives_no_warning_and_outlives_the_folder(store: Path) -> None:
    weights = open_store(store, read_spec(store))
    before = weights.matrices["layers.0.ffn.down"].dequantize()
    FileSystem().remove_tree(store)
    assert torch.equal(weights.matrices["layers.0.ffn.down"].dequantize(), before)


def test_a_store_of_another_model_is_refused(store: Path) -> None:
    spec = read_spec(store)
    for changes in ({"ffn_size": 77}, {"tied_head": True}, {"n_layers": 2, "sliding_windows": (None, None)}):
        with pytest.raises(StoreError, match="convert again"):
            open_store(store, replace(spec, **changes))


@pytest.mark.parametrize("name", ["layers.0.ffn.down", "head.tokens", "final_norm.norm"])
def test_missing_and_mistaken_tensors_are_refused(store: Path, tmp_path: Path, name: str) -> None:
    spec, whole = read_spec(store), read_manifest(store).entries
    place = next(i for i, entry in enumerate(whole) if entry.name == name)
    entry = whole[place]
    as_numbers = Entry(name, "fp32", (4,) * len(entry.shape), 0, 0, 0, None, UNKNOWN, "")
    wrong: list[Entry | None] = [None, replace(entry, name="layers.9.ffn.down"), as_numbers]
    if entry.layout != "fp32":
        wrong += [replace(entry, shape=(entry.shape[0] - 1, entry.shape[1])), replace(entry, shape=(16, 32))]
    assert open_store(hollow_store(tmp_path / "right", whole), spec).n_weights > 0
    for number, other in enumerate(wrong):
        entries = (*whole[:place], *([other] if other else []), *whole[place + 1 :])
        with pytest.raises(StoreError, match=re.escape(f"tensor {name}")):
            open_store(hollow_store(tmp_path / str(number), entries), spec)


def test_a_surplus_tensor_is_refused(store: Path, tmp_path: Path) -> None:
    surplus = Entry("more\x1b[2J", "fp32", (5,), 0, 0, 0, None, UNKNOWN, "")
    folder = hollow_store(tmp_path / "dummy", (*read_manifest(store).entries, surplus))
    with pytest.raises(StoreError, match=r"holds 'more\\x1b\[2J', which LlamaForCausalLM does not have"):
        open_store(folder, read_spec(store))


@pytest.mark.parametrize("change", [-1, 1, -4096])
def test_truncated_and_extended_weights_are_refused(store: Path, change: int) -> None:
    with (store / "weights.bin").open("r+b") as file:
        file.truncate((store / "weights.bin").stat().st_size + change)
    with pytest.raises(StoreError, match="its manifest says"):
        open_store(store, read_spec(store))


def test_missing_weights_are_refused(store: Path) -> None:
    (store / "weights.bin").unlink()
    with pytest.raises(StoreError, match="is missing"):
        open_store(store, read_spec(store))


def test_an_empty_store_is_refused(store: Path) -> None:
    manifest = replace(read_manifest(store), entries=(), weights_bytes=0)
    (store / "manifest.json").write_bytes(manifest.to_json())
    (store / "weights.bin").write_bytes(b"")
    with pytest.raises(StoreError, match=r"weights\.bin"):
        open_store(store, read_spec(store))


def test_conversion_holds_two_tensors_at_a_time(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a tensor is read, only the one before and what is made of it are left."""
    values: list[weakref.ref[Any]] = []
    tiles: list[weakref.ref[Any]] = []
    n_alive: list[int] = []
    read, write = Checkpoint.values, StoreWriter.add_matrix

    def watched_read(checkpoint: Checkpoint, name: str, workers: Workers = map) -> torch.Tensor:
        n_alive.extend(sum(reference() is not None for reference in references) for references in (values, tiles))
        found = read(checkpoint, name, workers)
        values.append(weakref.ref(found))
        return found

    def watched_write(writer: StoreWriter, name: str, weight: Any) -> None:
        tiles.append(weakref.ref(weight.tiles))
        write(writer, name, weight)

    monkeypatch.setattr(Checkpoint, "values", watched_read)
    monkeypatch.setattr(StoreWriter, "add_matrix", watched_write)
    convert(model_folder, read_spec(model_folder), tmp_path / "store", Quantization())
    assert len(values) == 3 + 6 and len(tiles) == 6 and max(n_alive) == 1  # three norms, six matrices


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


@pytest.mark.parametrize("family", ["llama", "deepseek2"])
def test_a_store_with_the_former_matrices_of_latent_attention_is_not_found(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(random_model(family), tmp_path)
    found = source.Source.of(folder)
    files = [asdict(file) for file in found.files]
    identity = [FORMAT_VERSION, FAST.version, read_config_file(folder), files, FAST.identity]
    former = sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    assert (found.key(FAST) == former) == (family == "llama")


def rewritten(file: Path, change: Callable[[bytearray], None]) -> None:
    """Other content of the same size and time, as archives and reproducible images make it."""
    status, content = file.stat(), bytearray(file.read_bytes())
    change(content)
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_other_weights_of_the_same_size_and_time_are_told_apart(model_folder: Path, tmp_path: Path) -> None:
    """Also where a folder of the same name held the first: no path is part of what a store is found by."""
    first, second = tmp_path / "a" / "model", tmp_path / "b" / "model"
    for folder in (first, second):
        shutil.copytree(model_folder, folder)
    cache = tmp_path / "cache"
    assert cached_store(first, FAST, cache) == cached_store(second, FAST, cache)

    def negate(content: bytearray) -> None:
        content[len(content) // 2] ^= 128

    rewritten(second / "model.safetensors", negate)
    assert cached_store(first, FAST, cache) != cached_store(second, FAST, cache)


def test_a_large_file_is_sampled_all_over(tmp_path: Path) -> None:
    """64 MB: a change of any run of 260 KB is seen, and of any byte of the header."""
    file, header = (
        tmp_path / "model.safetensors",
        b'{"a":{"dtype":"F32","shape":[16777216],"data_offsets":[0,67108864]}}',
    )
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2**26))

    def sample() -> str:
        return source.Source.of(tmp_path).files[0].sample_sha256

    before = sample()
    for start, n_bytes in ((0, 1), (40, 1), (2**20, 260_000), (2**25 + 12345, 260_000), (2**26 + 60, 1)):

        def invert(content: bytearray, start: int = start, n_bytes: int = n_bytes) -> None:
            content[start : start + n_bytes] = bytes(255 - byte for byte in content[start : start + n_bytes])

        rewritten(file, invert)
        assert sample() != before, (start, n_bytes)
        rewritten(file, invert)
        assert sample() == before


def test_the_manifest_has_the_digest_of_every_source_file(model_folder: Path, tmp_path: Path) -> None:
    store = convert(model_folder, read_spec(model_folder), tmp_path / "store", FAST)
    digests = json.loads((store / "manifest.json").read_text())["source"]["sha256"]
    assert digests["model.safetensors"] == sha256((model_folder / "model.safetensors").read_bytes()).hexdigest()
    assert set(digests) == {file.name for file in source.Source.of(model_folder).files}


UNKNOWN = "0" * 64  # a checksum that is still to come


@cache
def zeros_sha256(n_bytes: int) -> str:
    return sha256(bytes(n_bytes)).hexdigest()


def planned_entries(spec: ModelSpec) -> list[Entry]:
    """One entry for each tensor, as a conversion would lay them out; places and checksums are still to come."""
    entries = []
    for tensor in all_tensors(decoder_blocks(spec)):
        layout = {"matrix": "int4", "vocabulary": "int8"}.get(tensor.role.value, "fp32")
        codebook = LINEAR_CODEBOOK if layout == "int4" else None
        scales_sha256 = "" if layout == "fp32" else UNKNOWN
        entries.append(Entry(tensor.name, layout, tensor.shape, 0, 0, 0, codebook, UNKNOWN, scales_sha256))
    return entries


def hollow_store(folder: Path, entries: Iterable[Entry]) -> Path:
    """A store of these tensors whose weights.bin is a hole: nothing on the disk, and every weight 0."""
    placed, end = [], 0
    for entry in entries:
        here = replace(entry, offset=aligned(end), sha256=zeros_sha256(entry.data_bytes))
        if entry.layout != "fp32":
            scales_offset = aligned(here.offset + entry.data_bytes)
            here = replace(here, scales_offset=scales_offset, scales_sha256=zeros_sha256(entry.scales_bytes))
        placed.append(here)
        end = here.regions[-1].end
    folder.mkdir()
    (folder / "manifest.json").write_bytes(Manifest("codebook", "int8", {}, (), end, tuple(placed)).to_json())
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(end)
    return folder


def test_a_store_of_7b_opens_at_once(tmp_path: Path) -> None:
    spec = read_spec(LLAMA_7B)
    folder = hollow_store(tmp_path / "7b", planned_entries(spec))
    began = time.process_time()
    weights = open_store(folder, spec)
    cpu_s = time.process_time() - began
    print(f"opened {weights.n_bytes / 2**30:.2f} GiB, {weights.n_weights / 1e9:.2f} G weights, in {cpu_s:.3f} s of CPU")
    assert cpu_s < 5
    assert weights.n_weights == 6_738_415_616
    assert torch.equal(weights.matrices["head.tokens"].rows(torch.tensor([31_999])), torch.zeros(1, 4096))


def hashed_bytes(spec: ModelSpec) -> int:
    """What opening looks at."""
    regions = [region for entry in planned_entries(spec) for region in entry.regions]
    return sum(region.n_bytes for region in regions if region.part != "tiles")


def test_opening_hashes_as_much_as_the_format_page_says(demo: Path) -> None:
    spec = read_spec(LLAMA_7B)
    total_bytes = planned_bytes(all_tensors(decoder_blocks(spec)), Quantization())
    page = " ".join((Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text().split())
    assert f"leaves {hashed_bytes(spec) / 1e9:.2f} GB" in page and f"a store of {total_bytes / 1e9:.2f} GB" in page
    assert f"for the demo model, {hashed_bytes(read_spec(demo)) / 1e6:.2f} MB" in page


@pytest.mark.slow
def test_a_store_larger_than_memory_opens(tmp_path: Path) -> None:
    """What is never read needs no memory: a part of the weights may be on its way to a GPU, layer by layer."""
    memory_bytes = psutil.virtual_memory().total + psutil.swap_memory().total
    if memory_bytes > 64 * 2**30:
        pytest.skip("opening reads a tenth of a store, which takes long for one larger than this memory")
    one_layer = read_spec(LLAMA_7B | {"num_hidden_layers": 1})
    n_layers = int(1.1 * memory_bytes / sum(each.data_bytes for each in planned_entries(one_layer)[1:7]))
    spec = read_spec(LLAMA_7B | {"num_hidden_layers": n_layers})
    folder = hollow_store(tmp_path / "huge", planned_entries(spec))
    assert open_store(folder, spec).n_bytes > memory_bytes
