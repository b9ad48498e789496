"""The worst of the bad models in processes of their own: little memory, and the same errors without asserts."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bad_models import (
    CONFIG,
    INDEX,
    ROOT,
    SINGLE,
    TOKENIZER,
    Spoil,
    content,
    edit_header,
    edit_json,
    safetensors,
    sparse,
)

GIGABYTE = 2**30
# Opens the folders named as arguments; prints the growth of memory over that of a good model, and each error.
PROGRAM = """
import json, sys
from hetero_ee import Engine, HeteroError

def peak():  # not getrusage's, which begins with that of the parent
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return 1024 * int(status["VmHWM"].split()[0])

good, *folders = sys.argv[1:]
Engine.from_pretrained(good, quantizer="none", threads=1).close()
before, errors = peak(), {}
for folder in folders:
    try:
        Engine.from_pretrained(folder, quantizer="none", threads=1).close()
        errors[folder] = ["opened", ""]
    except HeteroError as error:
        errors[folder] = [type(error).__name__, str(error)]
    except BaseException as error:
        errors[folder] = ["not typed: " + type(error).__name__, str(error)]
print(json.dumps({"growth": peak() - before, "errors": errors}))
"""


def wide(text: str) -> bytes:
    """Python keeps a text with one such letter in four bytes a letter."""
    return text.encode() + "\U0001f600".encode()


WORST: dict[str, tuple[Spoil, str]] = {
    "header of small objects": (
        content(SINGLE, safetensors(b'{"a":[' + b'{"a":0},' * 600_000 + b"0]}")),
        "CheckpointError",
    ),
    "header of 32 MB in one name": (content(SINGLE, safetensors(b'{"' + b"n" * (32 * 2**20 - 10))), "CheckpointError"),
    "header of 32 MB of wide text": (
        content(SINGLE, safetensors(b'{"' + wide("n" * (32 * 2**20 - 20)) + b'":1}')),
        "CheckpointError",
    ),
    "header of a terabyte": (sparse(SINGLE, 2**40, (2**39).to_bytes(8, "little")), "CheckpointError"),
    "index of small objects": (content(INDEX, b"[" + b'{"a":0},' * 190_000 + b"0]"), "CheckpointError"),
    "index of 32 MB of wide text": (content(INDEX, b'{"' + wide("n" * (32 * 2**20 - 20)) + b'":1}'), "CheckpointError"),
    "configuration of small objects": (content(CONFIG, b'{"a":[' + b'{"a":0},' * 190_000 + b"0]}"), "ModelError"),
    "configuration of a terabyte": (sparse(CONFIG, 2**40), "ModelError"),
    "vocabulary of 2^24": (edit_json(CONFIG, lambda c: c.update(vocab_size=2**24)), "CheckpointError"),
    "width of 2^24": (edit_json(CONFIG, lambda c: c.update(hidden_size=2**24, head_dim=2**24)), "CheckpointError"),
    "1000 layers, 2^24 heads": (
        edit_json(CONFIG, lambda c: c.update(num_hidden_layers=1000, num_attention_heads=2**24, head_dim=2)),
        "CheckpointError",
    ),
    "a tensor of 2^60 promised": (
        edit_header(lambda h: h["model.norm.weight"].update(shape=[2**58], data_offsets=[0, 2**60])),
        "CheckpointError",
    ),
    "tokenizer of small objects": (content(TOKENIZER, b"[" + b'{"a":0},' * 990_000 + b"0]"), "ModelError"),
    "tokenizer of lists": (content(TOKENIZER, b"[" + b"[]," * 2_400_000 + b"[]]"), "ModelError"),
    "tokenizer of 64 MB of wide text": (
        content(TOKENIZER, b'{"' + wide("n" * (64 * 2**20 - 20)) + b'":1}'),
        "ModelError",
    ),
    "tokenizer with a vocabulary of a million": (
        edit_json(TOKENIZER, lambda t: t["model"].update(vocab={f"t{i}": -i for i in range(1_000_000)})),
        "ModelError",
    ),
    "token ids up to 2^32": (
        edit_json(TOKENIZER, lambda t: t["model"]["vocab"].update(Z=2**32 - 1)),
        "opened",
    ),
    "a context of 2^24": (edit_json(CONFIG, lambda c: c.update(max_position_embeddings=2**24)), "opened"),
}
OPTIMIZED: dict[str, tuple[Spoil, str]] = {
    "weights empty": (content(SINGLE, b""), "CheckpointError"),
    "weights overlap": (edit_header(lambda h: h["model.norm.weight"].update(data_offsets=[0, 192])), "CheckpointError"),
    "weights of other shape": (edit_header(lambda h: h["model.norm.weight"].update(shape=[24, 2])), "CheckpointError"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), "ModelError"),
    "negative width": (edit_json(CONFIG, lambda c: c.update(hidden_size=-1)), "ModelError"),
    "a tokenizer that doubles": (
        edit_json(
            TOKENIZER,
            lambda t: t.update(
                normalizer={
                    "type": "Sequence",
                    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40,
                }
            ),
        ),
        "ModelError",
    ),
    "an index out of the folder": (
        lambda folder: [
            (folder / SINGLE).unlink(),
            (folder / INDEX).write_text('{"weight_map": {"a": "../x.safetensors"}}'),
        ],
        "CheckpointError",
    ),
    "a store that is none": (content("manifest.json", b"{}"), "DamagedStoreError"),
}


@pytest.fixture
def spoiled(tiny: Path, tmp_path: Path) -> Callable[[dict[str, tuple[Spoil, str]]], dict[str, Path]]:
    """Makes a folder for each case."""

    def make(cases: dict[str, tuple[Spoil, str]]) -> dict[str, Path]:
        folders = {name: Path(shutil.copytree(tiny, tmp_path / name)) for name in cases}
        for name, (spoil, _) in cases.items():
            spoil(folders[name])
            if (folders[name] / INDEX).exists():
                (folders[name] / SINGLE).unlink(missing_ok=True)
        return folders

    return make


def outcomes(good: Path, folders: dict[str, Path], *options: str) -> tuple[int, dict[str, str]]:
    """Bytes by which memory has grown at its peak, and how each folder was refused."""
    command = [sys.executable, *options, "-c", PROGRAM, str(good), *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found["growth"], {name: found["errors"][str(folder)][0] for name, folder in folders.items()}


@pytest.mark.sample(0)
def test_the_worst_take_less_than_a_gigabyte(
    tiny: Path, spoiled: Callable[[dict[str, tuple[Spoil, str]]], dict[str, Path]]
) -> None:
    growth, errors = outcomes(tiny, spoiled(WORST))
    assert errors == {name: error for name, (_, error) in WORST.items()}
    assert growth < GIGABYTE, f"{growth / 2**20:.0f} MiB"


@pytest.mark.sample(0)
def test_no_check_is_an_assert(tiny: Path, spoiled: Callable[[dict[str, tuple[Spoil, str]]], dict[str, Path]]) -> None:
    """python -O leaves asserts out."""
    _, errors = outcomes(tiny, spoiled(OPTIMIZED), "-O")
    assert errors == {name: error for name, (_, error) in OPTIMIZED.items()}
