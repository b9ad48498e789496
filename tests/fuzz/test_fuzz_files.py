"""Quantized checkpoints, draft heads and split GGUF files that lie: each is refused in one sentence, or is read."""

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_ee.errors import HeteroError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.gguf.folder import gguf_folder
from hetero_ee.speculation.sources.draft_head_file import read_draft_head
from hetero_ee.weights.gguf_checkpoint import open_checkpoint
from hetero_ee.weights.model_weights import load_dense
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.conversion import convert
from hetero_ee.weights.store.reader import open_store
from tests.draft_heads import MODEL, save_head
from tests.e2e.test_packed_errors import PACKINGS, SIZES
from tests.families import random_model, save_checkpoint
from tests.fuzz.mutation import change_structure, change_text
from tests.gguf_models import write_gguf
from tests.packed_files import pack_checkpoint

HEADS, SPLIT = "draft head", "split GGUF"
KINDS = (*PACKINGS, HEADS, SPLIT)
LONGEST_S = 20
NUMBERS = (0, 1, -1, 7, 8, 127, 128, 255, 2**15, 2**31 - 1, -(2**31), 0.0, 1e30, -1e-30, float("nan"), float("inf"))
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool)


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A good folder of each kind."""
    model, folders = random_model("llama", **SIZES), {}
    for name, packing in PACKINGS.items():
        folders[name] = save_checkpoint(model, tmp_path_factory.mktemp(name))
        pack_checkpoint(folders[name], packing)
    folders[HEADS] = save_head(tmp_path_factory.mktemp("head"))
    folders[SPLIT] = tmp_path_factory.mktemp("gguf")
    pytest.importorskip("gguf")
    write_gguf(model, folders[SPLIT] / "m.gguf", lambda _: "Q4_0", part_tensors=5)
    return folders


def lie(folder: Path, rng: random.Random) -> str:
    """Changes a file; returns how."""
    files = sorted(
        path for path in folder.iterdir() if path.suffix in (".gguf", ".safetensors") or path.stem == "config"
    )
    file = rng.choice(files)
    if file.suffix == ".json":
        body = json.loads(file.read_text())
        inner = body.get("quantization_config")
        change_structure(inner if isinstance(inner, dict) and rng.random() < 0.8 else body, rng)
        file.write_text(json.dumps(body))
    elif file.suffix == ".gguf" or rng.random() < 0.2:
        data = file.read_bytes()
        head = min(len(data), 2**13)
        file.write_bytes(
            change_text(data[:head], rng) + data[head:] if rng.random() < 0.7 else data[: rng.randrange(len(data))]
        )
    else:
        tensors = load_file(file)
        name = rng.choice(sorted(tensors))
        tensors |= {name: rng.choice(CHANGES)(tensors[name], rng)}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items() if len(tensor.shape) < 9}, file)
        return f"{file.name}: {name} is {tensors[name].dtype} {list(tensors[name].shape)}"
    return file.name


def with_values(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    changed = tensor.clone()
    values = torch.tensor([rng.choice(NUMBERS) for _ in range(4)], dtype=torch.float64).nan_to_num(7, 2**31, -(2**31))
    kept = values if tensor.is_floating_point() and tensor.element_size() == 1 else values.to(tensor.dtype)
    flat = changed.view(-1) if tensor.numel() else changed
    for index in range(min(4, flat.numel())):
        flat[rng.randrange(flat.numel())] = rng.choice(NUMBERS) if tensor.is_floating_point() else kept[index].item()
    return changed


CHANGES: tuple[Callable[[torch.Tensor, random.Random], torch.Tensor], ...] = (
    with_values,
    with_values,
    lambda tensor, rng: tensor.float().to(rng.choice(TYPES)),
    lambda tensor, rng: tensor[: len(tensor) // 2] if tensor.dim() else tensor,
    lambda tensor, rng: tensor.reshape(-1),
    lambda tensor, rng: tensor.T if tensor.dim() == 2 else tensor[None],
    lambda tensor, rng: tensor.new_zeros(tensor.shape),
    lambda tensor, rng: tensor.new_zeros(0),
)


def use(folder: Path, kind: str, store: Path) -> None:
    """Everything that is done with such a folder."""
    if kind == HEADS:
        read_draft_head(folder, MODEL)
        return
    model = gguf_folder(next(iter(sorted(folder.glob("*.gguf")))), configuration_only=True) if kind == SPLIT else folder
    spec = read_spec(model)
    load_dense(open_checkpoint(model, spec))
    made = convert(model, spec, store, Quantization.of_model(model, None))
    open_store(made, spec)


def check_lie(folder: Path, kind: str, seed: int) -> bool:
    """Whether it is refused. Anything but a sentence, or a store of what is refused, fails."""
    rng = random.Random(f"{kind} {seed}")
    done, store, begun_s = lie(folder, rng), folder.parent / "store", time.perf_counter()
    try:
        use(folder, kind, store)
        refusal: Any = None
    except HeteroError as error:
        refusal = str(error)
        assert refusal.isprintable() and len(refusal) < 1000 + len(str(folder)), f"{kind} {seed}, {done}: {refusal}"
        assert not store.exists(), f"{kind} {seed}, {done}: {refusal}"
    except Exception as error:
        raise AssertionError(f"{kind} {seed}, {done}: {error!r}") from error
    assert not list(folder.parent.glob("*.partial")) and time.perf_counter() - begun_s < LONGEST_S
    return refusal is not None


@pytest.mark.parametrize("n_lies", [6, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_files_that_lie(wholes: dict[str, Path], kind: str, n_lies: int, memory_folder: Path, cache: Path) -> None:
    n_refused = 0
    for seed in range(n_lies):
        room = memory_folder / str(seed)
        folder = Path(shutil.copytree(wholes[kind], room / "model"))
        n_refused += check_lie(folder, kind, seed)
        shutil.rmtree(room)
    print(f"{kind}: {n_refused} of {n_lies} refused, the others read")
