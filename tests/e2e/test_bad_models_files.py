"""Pipes, devices, folders and links in place of a model's files: refused unopened, whoever would read them."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero_ee import Engine, HeteroError, StoreError
from hetero_ee.errors import CheckpointError, ModelError
from hetero_ee.weights.store.library import StoreState, stored_models
from tests.bad_models import CONFIG, GENERATION, INDEX, SINGLE, TOKENIZER, TOKENIZER_CONFIG, check_refusal, sparse
from tests.e2e.test_bad_models_tensors import SECOND, sharded

REVISION = "0123456789abcdef0123456789abcdef01234567"
READERS: dict[str, type[HeteroError]] = {
    CONFIG: ModelError,
    GENERATION: ModelError,
    SINGLE: CheckpointError,
    TOKENIZER: ModelError,
    TOKENIZER_CONFIG: ModelError,
    "tokenizer.model": ModelError,
    "vocab.json": ModelError,
    "merges.txt": ModelError,
    "special_tokens_map.json": ModelError,
    "added_tokens.json": ModelError,
    "chat_template.jinja": ModelError,
    "additional_chat_templates/one.jinja": ModelError,
    "tekken.json": ModelError,
    "manifest.json": StoreError,
}


def pipe(file: Path) -> None:
    os.mkfifo(file)


def folder_instead(file: Path) -> None:
    file.mkdir()


def link_to_null(file: Path) -> None:
    file.symlink_to("/dev/null")


def link_to_zeros(file: Path) -> None:
    file.symlink_to("/dev/zero")


def link_to_a_pipe(file: Path) -> None:
    os.mkfifo(file.with_name("pipe.safetensors"))
    file.symlink_to("pipe.safetensors")


def link_out(file: Path) -> None:
    """To a good file, but in a folder beside the model's."""
    stray = file.parent.parent / f"stray-{file.name}"
    stray.write_bytes(b"{}")
    file.symlink_to(stray)


def link_to_passwords(file: Path) -> None:
    file.symlink_to("/etc/passwd")


def link_to_nothing(file: Path) -> None:
    file.symlink_to("nothing-there")


def link_to_itself(file: Path) -> None:
    file.symlink_to(file.name)


def links_in_a_ring(file: Path) -> None:
    file.symlink_to("ring")
    file.with_name("ring").symlink_to(file.name)


def link_to_the_folder(file: Path) -> None:
    file.symlink_to(".")


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe": (pipe, "is a pipe, expected a regular file"),
    "a folder": (folder_instead, "is a folder, expected a regular file"),
    "a link to /dev/null": (link_to_null, "is a link out of its folder, to '/dev/null'"),
    "a link to /dev/zero": (link_to_zeros, "is a link out of its folder, to '/dev/zero'"),
    "a link to a pipe": (link_to_a_pipe, "is a pipe, expected a regular file"),
    "a link to a good file outside": (link_out, "is a link out of its folder"),
    "a link to /etc/passwd": (link_to_passwords, "is a link out of its folder, to '/etc/passwd'"),
    "a link to nothing": (link_to_nothing, "is a link that leads nowhere"),
    "a link to itself": (link_to_itself, "is a link that leads nowhere"),
    "a ring of links": (links_in_a_ring, "is a link that leads nowhere"),
    "a link to its folder": (link_to_the_folder, "is a folder, expected a regular file"),
}


def spoil(file: Path, kind: str) -> str:
    """Puts something of that kind in a file's place; gives words of the error."""
    make, words = KINDS[kind]
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    make(file)
    return words


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_regular_file_is_refused(own_tiny: Path, cache: Path, name: str, kind: str) -> None:
    words = spoil(own_tiny / name, kind)
    check_refusal(own_tiny, cache, READERS[name], words)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [INDEX, SECOND])
def test_neither_is_a_shard_or_an_index(own_tiny: Path, cache: Path, name: str, kind: str) -> None:
    sharded(own_tiny)
    words = spoil(own_tiny / name, kind)
    check_refusal(own_tiny, cache, CheckpointError, words)


def test_a_socket_is_refused(own_tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_tiny / CONFIG).unlink()
    monkeypatch.chdir(own_tiny)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(CONFIG)
        check_refusal(own_tiny, cache, ModelError, "is a socket, expected a regular file")


@pytest.mark.parametrize("kind", ["a pipe", "a link to /dev/zero", "a link to a pipe"])
def test_a_file_that_nobody_is_known_to_read_is_no_pipe_either(own_tiny: Path, cache: Path, kind: str) -> None:
    spoil(own_tiny / "vocab-src.json", kind)
    check_refusal(own_tiny, cache, ModelError, "expected a regular file")


@pytest.mark.parametrize("kind", ["a folder", "a link to a good file outside", "a link to nothing", "a link to itself"])
def test_what_else_lies_in_the_folder_does_not_matter(own_tiny: Path, kind: str) -> None:
    spoil(own_tiny / "trainer_state.json", kind)
    sparse("train.json", 2**33)(own_tiny)
    opens(own_tiny)


def test_a_folder_that_can_not_be_listed_is_refused(
    own_tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Path.iterdir

    def denied(folder: Path) -> Iterator[Path]:
        if folder == own_tiny:
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", denied)
    check_refusal(own_tiny, cache, ModelError, "can't be listed (Permission denied)")


def test_a_link_within_the_folder_counts(own_tiny: Path) -> None:
    for name in (CONFIG, SINGLE, TOKENIZER):
        (own_tiny / name).rename(own_tiny / f"real-{name}")
        (own_tiny / name).symlink_to(f"real-{name}")
    opens(own_tiny)


def test_a_link_to_the_folder_itself_counts(own_tiny: Path) -> None:
    """The user names the folder, not the model."""
    link = own_tiny.with_name("link")
    link.symlink_to(own_tiny)
    opens(link)


@pytest.mark.parametrize("shared", [False, True], ids=["blobs of the model", "blobs of the cache"])
def test_a_snapshot_of_the_hugging_face_cache_counts(own_tiny: Path, tmp_path: Path, shared: bool) -> None:
    snapshot = as_snapshot(own_tiny, tmp_path / "hub", shared=shared)
    assert all(file.is_symlink() for file in snapshot.iterdir())
    opens(snapshot)


@pytest.mark.parametrize("target", ["../../refs/main", "../../../models--other--model/blobs/x", "../../../../x"])
def test_a_snapshots_link_elsewhere_is_refused(own_tiny: Path, tmp_path: Path, cache: Path, target: str) -> None:
    snapshot = as_snapshot(own_tiny, tmp_path / "hub", shared=False)
    place = snapshot / target
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("{}")
    (snapshot / CONFIG).unlink()
    (snapshot / CONFIG).symlink_to(target)
    check_refusal(snapshot, cache, ModelError, "is a link out of its folder")


def test_a_folder_that_only_looks_like_a_snapshot_gets_no_more(own_tiny: Path, tmp_path: Path, cache: Path) -> None:
    """What is beside a folder called snapshots is not of a cache unless that lies in a models--... folder."""
    snapshot = as_snapshot(own_tiny, tmp_path / "hub", shared=False)
    repository = snapshot.parent.parent
    repository.rename(repository.with_name("mine"))
    check_refusal(repository.with_name("mine") / "snapshots" / REVISION, cache, ModelError, "out of its folder")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["manifest.json", "weights.bin", CONFIG])
def test_a_store_in_the_cache_is_listed_as_damaged(tmp_path: Path, name: str, kind: str) -> None:
    store = tmp_path / "stores" / "model-rtn-0123456789abcdef"
    store.mkdir(parents=True)
    for each in ("manifest.json", "weights.bin", CONFIG):
        (store / each).write_bytes(b"{}")
    spoil(store / name, kind)
    states = [model.state for model in stored_models(tmp_path)]
    assert states in ([StoreState.DAMAGED], [])  # what holds other files than a store's is none of ours


def as_snapshot(folder: Path, hub: Path, shared: bool) -> Path:
    """The model as huggingface_hub keeps it: links to blobs, which may be links to those of the whole cache."""
    repository = hub / "models--org--tiny"
    snapshot, blobs = repository / "snapshots" / REVISION, repository / "blobs"
    for place in (snapshot, blobs):
        place.mkdir(parents=True)
    for i, file in enumerate(sorted(folder.iterdir())):
        blob = blobs / f"{i:040x}"
        if shared:
            real = hub / "blobs" / f"{i:02x}" / f"{i:064x}"
            real.parent.mkdir(parents=True)
            shutil.copy(file, real)
            blob.symlink_to(Path("../../blobs") / real.parent.name / real.name)
        else:
            shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def opens(folder: Path) -> None:
    with Engine.from_pretrained(folder, quantizer="none", threads=1) as engine:
        assert engine.generate("a", max_new_tokens=2).n_generated_tokens == 2
