"""A Hub on this machine for the tests of Hugging Face ids, and a cache that is not the user's."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import Hub, running_hub
from tests.plotting import fake_matplotlib
from tests.store_support import contents, made_store, one_layer_model


@pytest.fixture
def hub_server() -> Iterator[Hub]:
    """A Hub with nothing on it, which nobody has been told of."""
    with running_hub() as server:
        yield server


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """Where huggingface_hub keeps what it downloads in this test."""
    return tmp_path / "huggingface" / "hub"


@pytest.fixture
def hub(hub_server: Hub, hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that huggingface_hub asks in this process, without the settings and the token of whoever runs the tests."""
    import time

    import huggingface_hub
    from huggingface_hub import constants

    for name, value in {
        "ENDPOINT": hub_server.address,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub_server.address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(hub_cache),
        "HF_TOKEN_PATH": str(hub_cache.parent / "token"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": False,
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hetero_ee.hub.download.PAUSE_S", 0)
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))  # between huggingface_hub's retries
    huggingface_hub.close_session()  # made again, without a proxy
    yield hub_server
    huggingface_hub.close_session()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer, of which stores are made."""
    return one_layer_model(tmp_path_factory.mktemp("models") / "one layer")


@pytest.fixture(scope="session")
def whole(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the store that an undisturbed conversion of it makes."""
    return contents(made_store(model_folder, tmp_path_factory.mktemp("whole") / "store"))


@pytest.fixture
def matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matplotlib that saves what it draws as text."""
    monkeypatch.setitem(sys.modules, "matplotlib", fake_matplotlib())
