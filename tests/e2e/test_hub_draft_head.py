"""Draft heads by Hugging Face id: what is downloaded, what is refused."""

from pathlib import Path

import pytest

from hetero_ee import CheckpointError, ModelError, UsageError
from hetero_ee.hub.draft_head import is_head_id, resolve_draft_head
from hetero_ee.speculation.sources.draft_head_file import read_draft_head
from tests.draft_heads import MODEL
from tests.eagle3_heads import DIALECTS, save_eagle3
from tests.hub_model import files_of
from tests.hub_server import Hub

ID = "some-org/Some-EAGLE3"


def test_the_first_use_downloads_two_files_and_the_second_nothing(hub: Hub, tmp_path: Path, hub_cache: Path) -> None:
    files = files_of(save_eagle3(tmp_path / "head", DIALECTS["SpecForge"]))
    commit = hub.publish(ID, files | {"README.md": b"useless", "pytorch_model.bin": b"useless"})
    folder = resolve_draft_head(ID)
    assert folder == hub_cache / "models--some-org--Some-EAGLE3" / "snapshots" / commit
    assert hub.fetched() == {"config.json", "model.safetensors"}
    assert isinstance(folder, Path) and read_draft_head(folder, MODEL).dialect.captured
    n_requests = len(hub.log)
    assert resolve_draft_head(ID) == resolve_draft_head(ID, offline=True) == folder and len(hub.log) == n_requests


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"config.json": b"{}", "pytorch_model.bin": b"useless"},
            r"pytorch_model\.bin.*never read.*convert_draft",
        ),
        ({"config.json": b"{}"}, r"has no model\.safetensors, a draft head's weights"),
        ({"model.safetensors": b"useless"}, r"has no config\.json"),
    ],
)
def test_what_is_no_head_is_refused_before_it_is_downloaded(hub: Hub, files: dict[str, bytes], words: str) -> None:
    hub.publish(ID, files)
    with pytest.raises((CheckpointError, ModelError), match=words):
        resolve_draft_head(ID)
    assert hub.fetched() == set()


def test_what_is_not_there(hub: Hub, hub_cache: Path) -> None:
    with pytest.raises(ModelError, match="has no model some-org/Some-EAGLE3"):
        resolve_draft_head(ID)
    with pytest.raises(ModelError, match="not in the cache, and this is offline"):
        resolve_draft_head(ID, offline=True)
    with pytest.raises(UsageError):
        resolve_draft_head("some-org/a--b")


def test_paths_stay_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for path in ("a/b", "./a/c", "/a/b", "~/b", "a", "a/b/c", "a/", Path("a/c"), None):
        assert not is_head_id(path) and resolve_draft_head(path) == path
    assert is_head_id("a/c")
