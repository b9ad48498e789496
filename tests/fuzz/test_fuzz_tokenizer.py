"""Mutated tokenizer files: refused in one sentence or harmless, soon, in bounded memory, with nothing printed."""

import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.errors import ModelError
from hetero_ee.text.tokenizer import Tokenizer
from tests.bad_models import MAX_LENGTH
from tests.fuzz.mutation import mutated

TEXT, VOCABULARY = "Once upon a time", 4096
MAX_SECONDS, MAX_GROWTH_BYTES = 10.0, 2**30
END = {"content": "</s>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
FILES: dict[str, Any] = {
    "special_tokens_map.json": {"bos_token": "<s>", "eos_token": END, "additional_special_tokens": ["<s>", "</s>"]},
    "added_tokens.json": {"<s>": 0, "</s>": 1, "<extra>": 600},
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": END | {"__type": "AddedToken"},
        "extra_special_tokens": ["<s>"],
        "added_tokens_decoder": {"0": END | {"content": "<s>", "special": True}, "1": END},
    },
    "vocab.json": None,  # the demo model's
    "merges.txt": None,
}
FIELDS = ("tokenizer_file", "vocab_file", "merges_file", "auto_map", "x_file", "backend", "tokenizer_object", "self")
DEEP: Any = "x"
for _ in range(900):
    DEEP = [DEEP]
HOSTILE: tuple[Any, ...] = (
    *(
        "/etc/passwd",
        "../../x",
        "\x1b]52;c;QQ==\x07",
        "\ud800",
        "a\0b",
        "\u202e",
        "x" * 10**6,
        -1,
        2**31,
        2**63,
        10**400,
    ),
    *(DEEP, {"AutoTokenizer": ["evil.Evil", None]}, {"content": "x", "colour": 1}, {"content": 7}, [["a"]], 1e308),
    *({"__type": "AddedToken"}, {"content": ""}, ["x"] * 1000, {str(n): n for n in range(1000)}, False, None),
)


@pytest.fixture(scope="module")
def good(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each file holds before it is mutated."""
    model = json.loads((demo / "tokenizer.json").read_text())["model"]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    return FILES | {"vocab.json": model["vocab"], "merges.txt": "\n".join(["#version: 0.2", *merges])}


def hostile_json(body: dict[str, Any], rng: random.Random) -> bytes:
    """A field more, or one exchanged, where an attacker would put it. `body` is changed."""
    place = rng.choice([body, *(value for value in body.values() if isinstance(value, dict))])
    place[rng.choice((*FIELDS, *place))] = rng.choice((*HOSTILE, 0, 5, 2**20, 2**20 + 1, "</s>"))
    return json.dumps(body).encode()


def hostile_merges(text: str, rng: random.Random) -> bytes:
    lines = text.split("\n")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        wrong = ("nowhere seen", "a", "a b c", "", " ", "\x1b a", "e \ud800", "x" * 10**6 + " a", "\0 \0", lines[0])
        lines[at] = rng.choice(wrong)
    data = "\n".join(lines).encode(errors="surrogatepass")
    cut = rng.randrange(len(data))
    return rng.choice((data, data[:cut], data[:cut] + b"\xff\xfe" + data[cut:], b"", data * 3))


def mutation(seed: int, good: dict[str, Any]) -> tuple[str, bytes]:
    """A file's name and what it holds instead."""
    rng = random.Random(seed)
    name = list(FILES)[seed % len(FILES)]
    if name == "merges.txt":
        return name, hostile_merges(good[name], rng)
    return name, (hostile_json if rng.random() < 0.5 else mutated)(json.loads(json.dumps(good[name])), rng)


def write_model(folder: Path, demo: Path, good: dict[str, Any], seed: int) -> str:
    """A tokenizer with one file mutated; returns which. Each is there with those that let the library read it."""
    name, data = mutation(seed, good)
    for old in folder.iterdir():
        old.unlink()
    if name in ("vocab.json", "merges.txt"):
        (folder / "vocab.json").write_text(json.dumps(good["vocab.json"]))
        (folder / "merges.txt").write_text(good["merges.txt"])
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    else:
        in_config = ("added_tokens_decoder",) if name != "tokenizer_config.json" else ()  # it goes before other files
        for each in ("special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"):
            body = {field: value for field, value in good[each].items() if field not in in_config}
            (folder / each).write_text(json.dumps(body))
        (folder / "tokenizer.json").write_bytes((demo / "tokenizer.json").read_bytes())
    (folder / name).write_bytes(data)
    return name


def means_to_change(data: bytes) -> bool:
    """Whether it makes a piece of the text a token: such a file is another tokenizer, not a damaged one."""
    try:
        found = json.dumps(json.loads(data), ensure_ascii=False)
    except ValueError:
        return False
    return any(f'"{TEXT[start:end]}"' in found for start in range(len(TEXT)) for end in range(start + 1, len(TEXT) + 1))


def check(folder: Path, name: str, expected: list[int]) -> bool:
    """Opens the tokenizer as the engine does; returns whether it was accepted."""
    start_s = time.process_time()
    try:
        ids = Tokenizer.load(folder, VOCABULARY).encode(TEXT)
    except ModelError as error:
        message = str(error)
        assert message.isprintable() and message.endswith(".") and len(message) < MAX_LENGTH, message
        return False
    finally:
        seconds = time.process_time() - start_s
        assert seconds < MAX_SECONDS, f"{seconds:.1f} s"
    assert all(0 <= each < VOCABULARY for each in ids)
    is_other = name in ("vocab.json", "merges.txt") or means_to_change((folder / name).read_bytes())
    assert is_other or ids == expected, ids
    return True


@pytest.fixture
def fuzz(
    memory_folder: Path, demo: Path, good: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[[range], int]]:
    """Checks the seeds' mutations and returns how many were accepted."""

    def run(seeds: range) -> int:
        expected = Tokenizer.load(demo, VOCABULARY).encode(TEXT)
        before, n_accepted = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
        for seed in seeds:
            name = write_model(memory_folder, demo, good, seed)
            try:
                n_accepted += check(memory_folder, name, expected)
            except BaseException as error:
                raise AssertionError(f"seed {seed}, {name}: {error!r}") from error
        growth_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert growth_bytes < MAX_GROWTH_BYTES
        return n_accepted

    yield run
    assert capfd.readouterr().out == ""


@pytest.mark.sample(0)
def test_three_hundred_mutations(fuzz: Callable[[range], int]) -> None:
    assert 30 < fuzz(range(300)) < 270


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_mutation_through_the_command_line(
    own_tiny: Path, demo: Path, good: dict[str, Any], seed: int, said: str, tmp_path: Path
) -> None:
    """Standard output is the text alone, or nothing."""
    (tmp_path / "mutated").mkdir()
    name = write_model(tmp_path / "mutated", demo, good, seed)
    (own_tiny / "tokenizer.json").unlink()
    for file in (tmp_path / "mutated").iterdir():
        (own_tiny / file.name).write_bytes(file.read_bytes())
    command = [sys.executable, "-m", "hetero_ee_cli", "generate", TEXT, "-m", str(own_tiny), "-t", "1", "-n", "40"]
    ended = subprocess.run(
        [*command, "--quantizer", "none"],
        capture_output=True,
        timeout=60,
        check=False,
        env=os.environ | {"NO_COLOR": "1"},
    )
    assert ended.returncode in (0, 1) and b"Traceback" not in ended.stderr and b"\x1b" not in ended.stderr
    if ended.returncode:
        assert ended.stdout == b"" and ended.stderr.count(b"\n") == 1
    elif name not in ("vocab.json", "merges.txt"):
        assert ended.stdout.decode() == said or means_to_change((own_tiny / name).read_bytes())
