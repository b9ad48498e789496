"""hetero-ee convert and hetero-ee models."""

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.weights.store import library
from hetero_ee.weights.store.filesystem import FileSystem, store_lock
from hetero_ee_cli.commands import models
from tests.command_line import PROMPT, Cli, stores
from tests.store_support import contents, interrupted, one_layer_model

CONVERTING = "Converting the weights, once ...\n"
WAITING = "Another process is converting this model; waiting for it.\n"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_layer_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def store(cli: Cli, model_folder: Path) -> Path:
    """A store in the cache."""
    return Path(cli("convert", model_folder, "--quantizer", "rtn", "-t", 1).out.strip())


def test_convert_fills_the_cache_and_prints_where(cli: Cli, tiny: Path, cache: Path) -> None:
    arguments = ["--quantizer", "rtn", "-t", 1]
    first, second = cli("convert", tiny, *arguments), cli("convert", tiny, *arguments)
    (store,) = stores(cache)
    assert (first.code, first.out, first.err) == (0, f"{store}\n", CONVERTING)
    assert (second.code, second.out, second.err) == (0, f"{store}\n", "")
    generated = cli("generate", PROMPT, "-m", tiny, "-n", 3, *arguments)
    assert generated.code == 0 and CONVERTING not in generated.err


def test_convert_to_a_folder(cli: Cli, model_folder: Path, tmp_path: Path, cache: Path) -> None:
    output = tmp_path / "out" / "store"
    arguments = ["convert", model_folder, "-t", 1, "--output", output, "--quantizer"]
    assert cli(*arguments, "rtn").out == f"{output}\n"
    before = contents(tmp_path / "out")
    assert cli(*arguments, "rtn").out == f"{output}\n"
    for refused in (cli(*arguments, "search"), cli("convert", model_folder, "-o", tmp_path)):
        assert refused.code == 2 and "is there already" in refused.err and refused.out == ""
    assert contents(tmp_path / "out") == before and not stores(cache)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere/at/all/"], 2, "nowhere"),
        (["{model}", "--quantizer", "none"], 2, "codebook, search, rtn"),
        (["{model}", "-t", "-1"], 2, "whole number"),
        (["{model}", "-o", "{model}/config.json/store"], 1, "can't be written"),
        ([], 2, "no model is named"),
    ],
    ids=range(5),
)
def test_convert_refuses_in_one_line(
    cli: Cli, model_folder: Path, cache: Path, arguments: list[str], code: int, words: str
) -> None:
    ended = cli("convert", *(argument.format(model=model_folder) for argument in arguments))
    assert ended.code == code and words in ended.err and re.fullmatch(r"hetero-ee: [^\n]+\n", ended.err)
    assert not stores(cache)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_disk_that_fills_up_has_an_exit_code_of_its_own(
    cli: Cli, model_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = FileSystem.write

    def write(self: FileSystem, file: Any, data: Any) -> None:
        if file.tell() > 10_000:
            raise OSError(code, os.strerror(code))
        real(self, file, data)

    monkeypatch.setattr(FileSystem, "write", write)
    ended = cli("convert", model_folder, "--quantizer", "rtn", "-t", 1)
    said = ended.err.removeprefix(CONVERTING)
    assert ended.code == 28 and re.fullmatch(r"hetero-ee: [^\n]* its disk is full [^\n]*\n", said) and not ended.out
    assert not stores(cache)


def test_models_lists_stores(cli: Cli, model_folder: Path, store: Path, cache: Path) -> None:
    interrupted(model_folder, store.with_name("half"))
    broken = Path(shutil.copytree(store, store.with_name("broken")))
    os.truncate(broken / "weights.bin", 9)
    listed = cli("models")
    head, *rows = listed.out.splitlines()
    assert listed.code == 0 and head.split() == [
        *("name", "state", "made", "from", "quantizer", "bits", "error", "calibration", "size", "last", "used")
    ]
    day = time.strftime("%Y-%m-%d")
    assert [re.split(r"  +", row) for row in rows] == [
        ["broken", "damaged", "safetensors", "rtn", *re.split(r"  +", rows[0])[4:]],
        ["half.partial", "unfinished", *re.split(r"  +", rows[1])[2:]],
        [store.name, "whole", "safetensors", "rtn", rows[2].split()[4], "-", "0.1 MiB", day],
    ]
    assert re.fullmatch(rf"3 stores, 0\.\d MiB, in {store.parent}\n", listed.err)
    assert cli("models", "list") == listed


def test_what_manifests_say_does_not_command_the_terminal(
    cli: Cli, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = library.stored_models(store.parents[1])
    monkeypatch.setattr(library, "stored_models", lambda cache: [replace(found, quantizer="rtn\x1b[31m\n")])
    listed = cli("models").out
    assert r"rtn\x1b[31m\n" in listed and "\x1b" not in listed and listed.count("\n") == 2


def test_models_lists_errors(cli: Cli, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales rounded to fp16 are an error of 1e-8, not a small share of exact weights."""
    (found,) = library.stored_models(store.parents[1])
    rounded = replace(found, exact_share=0.21, relative_squared_error=7.8e-9)
    monkeypatch.setattr(library, "stored_models", lambda cache: [rounded])
    row = cli("models").out.splitlines()[1]
    assert " 8e-09 " in row and "21%" not in row


def test_models_lists_as_json(cli: Cli, store: Path) -> None:
    listed = cli("models", "--json")
    document = json.loads(listed.out)
    assert (document["schema"], document["folder"], listed.err) == (2, str(store.parent), "")
    (row,) = document["stores"]
    assert row["last_used_s"] > 1e9 and row["n_bytes"] > 70_000
    assert 4.5 < row["bits"] < 9  # padding included
    told = {key: value for key, value in row.items() if key not in ("last_used_s", "n_bytes", "bits")}
    architecture = {"model": "tiny", "architecture": "LlamaForCausalLM", "quantizer": "rtn", "has_calibration": False}
    architecture |= {"source_format": "safetensors", "exact_share": None, "relative_squared_error": None}
    assert told == {"name": store.name, "path": str(store), "state": "whole", **architecture}
    assert cli("models", "list", "--json") == listed
    assert cli("models", "--json", "list").code == 2


def test_no_stores_are_no_table(cli: Cli, cache: Path) -> None:
    listed = cli("models")
    assert (listed.code, listed.out, listed.err) == (0, "", f"0 stores, 0.0 MiB, in {cache / 'stores'}\n")
    assert json.loads(cli("models", "--json").out)["stores"] == []
    assert cli("models", "verify").code == 0


def test_remove_asks_and_needs_somebody_to_ask(cli: Cli, store: Path) -> None:
    refused = cli("models", "remove", "tiny")
    assert refused.code == 2 and "--yes" in refused.err and store.is_dir()
    unknown = cli("models", "remove", "tiny", "other", "--yes")
    assert unknown.code == 2 and "there is no store 'other'" in unknown.err and store.is_dir()
    calibration = store.with_name(f"{store.name}.calibration")
    calibration.mkdir()
    (calibration / "calibration.json").touch()
    assert [row["has_calibration"] for row in json.loads(cli("models", "--json").out)["stores"]] == [True]
    assert re.search(r"  rtn +[\d.]+ +yes  ", cli("models").out)
    removed = cli("models", "remove", "tiny", store.name, "--yes")
    assert (removed.code, removed.out, removed.err) == (0, f"{store.name}\n", "")
    assert not store.exists() and not calibration.exists()


class Terminal(io.StringIO):
    """Standard input with somebody there."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("answer", ["y\n", "YES\n", "n\n", "\n", "", "yesterday\n"])
def test_the_answer_counts(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    goes = answer.strip().lower() in ("y", "yes")
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    models.remove([store.name])
    out, err = capsys.readouterr()
    assert store.exists() != goes and out == (f"{store.name}\n" if goes else "")
    assert err.startswith(f"{store.name}, 0.1 MiB\nRemove? [y/N] ")


def test_who_is_asked_is_told_of_a_calibration(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration = store.with_name(f"{store.name}.calibration")
    calibration.mkdir()
    (calibration / "calibration.json").touch()
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    models.remove([store.name])
    assert capsys.readouterr().err.startswith(f"{store.name}, 0.1 MiB, and its calibration\nRemove? [y/N] ")
    assert calibration.is_dir() and store.is_dir()


def test_verify_names_what_is_damaged(cli: Cli, store: Path, tmp_path: Path) -> None:
    assert (cli("models", "verify").code, cli("models", "verify").out) == (0, f"{store.name}: intact\n")
    copy = Path(shutil.copytree(store, tmp_path / "copy"))
    data = bytearray((copy / "weights.bin").read_bytes())
    data[5] ^= 1
    (copy / "weights.bin").write_bytes(data)
    (copy / "more.txt").touch()
    ended = cli("models", "verify", copy, "tiny")
    assert (ended.code, ended.err) == (1, "")
    assert ended.out == (
        "copy: 'more.txt': does not belong to a store\n"
        "copy: weights.bin at byte 0: 'embedding.tokens' tiles does not match its checksum\n"
        f"{store.name}: intact\n"
    )
    ended = cli("models", "verify", "~nobody-of-this-name/store")
    assert ended.code == 2 and re.fullmatch(r"hetero-ee: [^\n]+ no such home folder\.\n", ended.err)
    ended = cli("models", "verify", copy, "--json")
    document = json.loads(ended.out)
    assert ended.code == 1 and (document["schema"], document["stores"][0]["path"]) == (2, str(copy))
    assert document["stores"][0]["findings"][1] == {
        "file": "weights.bin",
        "part": "'embedding.tokens' tiles",
        "offset": 0,
        "what": "does not match its checksum",
    }
    assert cli("models", "verify", "nothing").code == 2
    assert cli("models", "verify", tmp_path / "nowhere").code == 1


@contextmanager
def converting(cache: Path, model_folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`hetero-ee convert` as a process of its own, ended at the latest with the block."""
    command = [sys.executable, "-m", "hetero_ee_cli", "convert", str(model_folder), "--quantizer", "rtn", "-t", "1"]
    environment = os.environ | {"HETERO_EE_CACHE_DIR": str(cache)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (None, 0)])
@pytest.mark.sample(0)
def test_who_waits_says_so_and_can_be_stopped(
    store: Path, model_folder: Path, cache: Path, sent: signal.Signals | None, code: int
) -> None:
    whole = contents(store)
    shutil.rmtree(store)
    with converting(cache, model_folder) as process:
        with store_lock(store, FileSystem(), lambda: None):
            assert process.stderr and process.stderr.readline().decode() == WAITING
            if sent:
                process.send_signal(sent)
                process.wait(timeout=10)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code
    if sent:
        assert (out, err, stores(cache)) == (b"", b"", [])
    else:
        assert (out.decode(), err.decode()) == (f"{store}\n", CONVERTING)
        assert contents(store) == whole


def test_help_and_listing_come_without_torch(cache: Path) -> None:
    environment = os.environ | {"HETERO_EE_CACHE_DIR": str(cache)}
    for command in (["convert", "--help"], ["models", "--help"], ["models", "verify", "--help"]):
        started = [sys.executable, "-X", "importtime", "-m", "hetero_ee_cli", *command]
        ended = subprocess.run(started, capture_output=True, text=True, check=True, env=environment)
        imported = {line.rsplit("|")[-1].strip().split(".")[0] for line in ended.stderr.splitlines()}
        assert "hetero_ee_cli" in imported and not imported & {"torch", "transformers", "numpy", "safetensors", "rich"}
