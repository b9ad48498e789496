"""Downloads that go wrong: what is tried again, what is said, and what is left in the cache."""

import errno
import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from hetero_ee import CheckpointError, DiskFullError, HeteroError, ModelError
from hetero_ee.hub import repository as hub_module
from tests.hub_model import ID, SINGLE, Calls, files_of, in_shards, resolve
from tests.hub_server import DEAD_ADDRESS, Fault, Hub

TOKEN = "hf_correctTOKEN123"


def refusal(**options: Any) -> HeteroError:
    with pytest.raises(HeteroError) as caught:
        resolve(**options)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and len(message) < 500
    assert "/large/" not in message and "http://localhost" not in message  # signed addresses are nobody's business
    return caught.value


def left_in(cache: Path) -> list[Path]:
    """Unfinished files."""
    return [path for path in cache.rglob("*") if path.suffix == ".incomplete"]


@pytest.mark.parametrize("n_drops", [1, 3])
def test_a_broken_connection_is_taken_up_where_it_broke(
    hub: Hub, tiny: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch, n_drops: int
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what has come of a piece is lost with it
    hub.publish(ID, tiny)
    hub.faults.append(Fault("/large/", drop_after=10_500, times=n_drops))
    progress = Calls()
    assert files_of(resolve(progress=progress)) == files_of(tiny)
    assert hub.ranges() == [None, *(f"bytes={10_000 * n}-" for n in range(1, n_drops + 1))]
    n_sent_bytes = sum(asked.n_sent_bytes for asked in hub.log if asked.path.startswith("/large/"))
    assert n_sent_bytes == (tiny / SINGLE).stat().st_size + 500 * n_drops
    _, n_done, n_all = progress.calls[-1]
    assert n_done == n_all
    assert left_in(hub_cache) == []


def test_a_server_that_knows_no_ranges_is_read_from_the_beginning(hub: Hub, tiny: Path) -> None:
    hub.publish(ID, tiny)
    hub.faults += [
        Fault("/large/", drop_after=10_000, times=1),
        Fault("/large/", status=200, body=(tiny / SINGLE).read_bytes()),
    ]
    assert files_of(resolve()) == files_of(tiny)


def test_what_arrived_whole_is_kept_after_a_failure(hub: Hub, tiny: Path, hub_cache: Path) -> None:
    files = in_shards(files_of(tiny))
    hub.publish(ID, files)
    by_digest = {name: digest for digest, content in hub.contents.items() for name in files if files[name] == content}
    hub.faults.append(Fault(by_digest["model-00003-of-00003.safetensors"], drop_after=0, times=30))
    error = refusal()
    assert isinstance(error, CheckpointError) and "keeps arriving incomplete" in str(error)
    assert left_in(hub_cache) == []
    hub.faults.clear()
    assert "model-00003-of-00003.safetensors" in hub.fetched()
    assert files_of(resolve()) == files
    assert hub.fetched() <= {name for name in files if name.endswith(".safetensors")}  # the small ones came at first


@pytest.mark.parametrize("name", [SINGLE, "tokenizer.json"])
@pytest.mark.parametrize(
    "fault", [{"shorten": 1000}, {"shorten": 0}, {"corrupt": True}], ids=["short", "empty", "bits"]
)
def test_a_damaged_file_is_never_accepted(
    hub: Hub, tiny: Path, hub_cache: Path, name: str, fault: Mapping[str, Any]
) -> None:
    hub.publish(ID, tiny)
    where = "/large/" if name == SINGLE else f"/{name}"
    hub.faults.append(Fault(where, **fault))
    assert isinstance(refusal(), CheckpointError)
    (snapshot,) = hub_cache.glob("models--*/snapshots/*")
    assert name not in files_of(snapshot) and left_in(hub_cache) == []
    hub.faults[:] = [Fault(where, times=1, **fault)]  # once is mended by the next attempt
    assert files_of(resolve()) == files_of(tiny)


def test_progress_goes_back_with_a_file_that_begins_again(
    hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.publish(ID, tiny)
    hub.faults += [Fault("/large/", corrupt=True, pause_s=0.01, times=1), Fault("/large/", pause_s=0.01)]
    progress = Calls()
    resolve(progress=progress)
    done = [n_done for _, n_done, _ in progress.calls]
    assert done != sorted(done) and done[-1] == progress.calls[-1][2]


ANSWERS = {
    "gated": (Fault("/resolve/", "HEAD", status=403, headers={"X-Error-Code": "GatedRepo"}), "is gated: accept its"),
    "disabled": (
        Fault("/api/", status=403, headers={"X-Error-Message": "Access to this resource is disabled."}),
        "has been disabled",
    ),
    "unauthorized": (Fault("/api/", status=401), "hf auth login"),
    "forbidden": (Fault("/api/", status=403), "refuses access"),
    "no such model": (Fault("/api/", status=404, headers={"X-Error-Code": "RepoNotFound"}), "has no model"),
    "listed but gone": (Fault("tokenizer.json", "HEAD", status=404, headers={"X-Error-Code": "EntryNotFound"}), "404"),
    "content gone": (Fault("/large/", status=404), "answered 404"),
    "signature expired": (Fault("/large/", status=403), "refuses access"),
    "too many requests": (Fault("/api/", status=429), "too many requests"),
    "failed": (Fault("/api/", status=500), r"failed (500)"),
    "content failed": (Fault("/large/", status=503), r"failed (503)"),
    "teapot": (Fault("/api/", status=418), "answered 418"),
    "no Hub": (Fault("/config.json", "HEAD", status=200), "does not answer like a Hugging Face Hub"),
    "in a circle": (Fault("/api/", location=f"/api/models/{ID}"), "in a circle"),
    "content in a circle": (Fault("/large/", location="/large/x"), "in a circle"),
    "sent to a dead address": (Fault("/large/", location=DEAD_ADDRESS), "cannot be reached"),
    "sent to nonsense": (Fault("/large/", location="ftp://x/y"), "is not a web address"),
    "silence": (Fault("/api/", status=200, body=b"x" * 100, pause_s=0.5), "does not answer in time"),
    "hung up": (Fault("/api/", status=200, body=b"x" * 100, drop_after=10), "keeps arriving incomplete"),
}


@pytest.mark.parametrize(("fault", "sentence"), ANSWERS.values(), ids=ANSWERS)
def test_what_is_said(
    hub: Hub,
    tiny: Path,
    hub_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fault: Fault,
    sentence: str,
) -> None:
    monkeypatch.setattr(hub_module, "ANSWER_S", 0.2)
    hub.publish(ID, tiny)
    hub.faults.append(Fault(**{name: getattr(fault, name) for name in Fault.__slots__}))
    assert sentence in str(refusal())
    assert left_in(hub_cache) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("where", ["/api/", "/config.json", "/large/"])
@pytest.mark.parametrize("status", [500, 429])
def test_a_server_that_recovers_is_asked_again(hub: Hub, tiny: Path, where: str, status: int) -> None:
    hub.publish(ID, tiny)
    hub.faults += [Fault(where, method, status=status, times=2) for method in ("GET", "HEAD")]
    assert files_of(resolve()) == files_of(tiny)


def test_nobody_there(hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.publish(ID, tiny)
    folder = resolve()
    monkeypatch.setattr(constants, "ENDPOINT", DEAD_ADDRESS)
    progress = Calls()
    assert resolve(progress=progress) == folder
    assert [n_all for _, _, n_all in progress.calls] == [0]
    unfound = (
        r"^org/other is neither a folder here nor a converted model, and localhost:9 cannot be reached \(.*refused"
    )
    with pytest.raises(ModelError, match=unfound + r".*\); check the network"):
        resolve("org/other")
    monkeypatch.setattr(constants, "ENDPOINT", "htp:/x")
    with pytest.raises(ModelError, match=r"is not a web address .* correct HF_ENDPOINT"):
        resolve("org/other")


def test_a_proxy_that_is_not_there(hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setenv("HTTP_PROXY", DEAD_ADDRESS)
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    huggingface_hub.close_session()
    assert "cannot be reached" in str(refusal())


@pytest.mark.parametrize("gated", [False, True])
def test_tokens(hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch, gated: bool) -> None:
    hub.publish(ID, tiny)
    hub.tokens[ID] = TOKEN
    hub.gated |= {ID} if gated else set()
    sentence = "is gated: accept its terms" if gated else "or it is private"
    for token in (None, "hf_wrong"):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        message = str(refusal())
        assert sentence in message and "hf auth login" in message and "HF_TOKEN" in message
        assert "hf_wrong" not in message
        assert not any(name.endswith(".safetensors") for name in hub.fetched())
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert files_of(resolve()) == files_of(tiny)
    asked = {asked.path.startswith("/large/"): asked.token for asked in hub.log}
    assert asked == {False: TOKEN, True: None}  # the large files lie with somebody else
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    progress = Calls()
    assert files_of(resolve(progress=progress)) == files_of(tiny)
    assert bool(progress.calls) is not gated


def test_a_token_from_the_usual_file(hub: Hub, tiny: Path, hub_cache: Path) -> None:
    hub.publish(ID, tiny)
    hub.tokens[ID] = TOKEN
    hub_cache.parent.mkdir(parents=True)
    (hub_cache.parent / "token").write_text(TOKEN + "\n")
    assert files_of(resolve()) == files_of(tiny)


@pytest.mark.parametrize("token", ["hf_ž", "hf_\u2028x"])
def test_a_token_with_impossible_characters(hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    hub.publish(ID, tiny)
    monkeypatch.setenv("HF_TOKEN", token)
    assert "has characters no token has" in str(refusal())
    assert hub.log == []


def test_a_disk_too_small_is_told_before_the_weights_come(
    hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tiny)

    def leave_free(n_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=n_bytes))

    hub.publish(ID, tiny)
    leave_free(1000)
    error = refusal()
    assert isinstance(error, DiskFullError) and "has 0 MiB free" in str(error) and "HF_HOME" in str(error)
    assert hub.fetched() == {"config.json"}
    needed_bytes = sum(file.stat().st_size for file in tiny.iterdir() if file.name != "config.json")
    leave_free(needed_bytes - 1)
    with pytest.raises(DiskFullError):
        resolve()
    leave_free(needed_bytes)
    resolve()


def test_a_disk_that_fills_up_on_the_way(
    hub: Hub, tiny: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = in_shards(files_of(tiny))
    hub.publish(ID, files)
    last = max(hub.contents, key=lambda digest: len(hub.contents[digest]))
    real = Path.open

    def full(path: Path, *arguments: Any, **options: Any) -> IO[Any]:
        is_last = path.suffix == ".incomplete" and path.name.startswith(last)
        opened: IO[Any] = real(Path("/dev/full") if is_last else path, *arguments, **options)
        return opened

    monkeypatch.setattr(Path, "open", full)
    error = refusal()
    assert isinstance(error, DiskFullError) and str(hub_cache) in str(error) and "HF_HOME" in str(error)
    monkeypatch.setattr(Path, "open", real)
    assert left_in(hub_cache) == []
    hub.log.clear()
    assert files_of(resolve()) == files
    assert hub.fetched() <= {name for name in files if name.endswith(".safetensors")}


def test_a_cache_that_can_not_be(hub: Hub, tiny: Path, hub_cache: Path) -> None:
    hub.publish(ID, tiny)
    hub_cache.parent.mkdir()
    hub_cache.touch()
    assert f"the cache {hub_cache} can't be written" in str(refusal())


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EACCES, ModelError),
        (errno.EROFS, ModelError),
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
    ],
)
def test_a_cache_that_can_not_be_written(
    hub: Hub, tiny: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[HeteroError]
) -> None:
    hub.publish(ID, tiny)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "makedirs", refuse)
    error = refusal()
    assert type(error) is kind and str(hub_cache) in str(error) and "HF_HOME" in str(error)


def test_an_interrupted_download_ends_soon_and_leaves_no_half_files(hub: Hub, tiny: Path, hub_cache: Path) -> None:
    hub.publish(ID, in_shards(files_of(tiny)))
    hub.faults.append(Fault("/large/", pause_s=0.5))

    def interrupt(stage: str, n_done: int, n_all: int) -> None:
        if len(left_in(hub_cache)) == 3:
            raise KeyboardInterrupt

    # Its threads hang in pieces that take 50 s each.
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        resolve(progress=interrupt)
    assert time.monotonic() - began_s < 10  # the files would take 50 s
    assert left_in(hub_cache) == []


def test_an_interrupted_download_stops_with_the_next_piece(
    hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    hub.publish(ID, tiny)
    hub.faults.append(Fault("/large/", pause_s=0.2, times=1))

    def interrupt(stage: str, n_done: int, n_all: int) -> None:
        if hub.ranges():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve(progress=interrupt)
    began_s = time.monotonic()
    assert files_of(resolve()) == files_of(tiny)  # would wait for the first one's lock
    assert time.monotonic() - began_s < 10


def test_its_logger_is_as_it_was(hub: Hub, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("huggingface_hub")
    records: list[logging.LogRecord] = []
    listener = logging.Handler()
    monkeypatch.setattr(listener, "emit", records.append)
    logger.addHandler(listener)
    hub.faults += [
        Fault(
            "/api/", status=404, headers={"X-HF-Warning": f"{topic}; log in", "X-Error-Code": "RepoNotFound"}, times=1
        )
        for topic in ("first", "second")
    ]
    before = logger.level
    refusal()
    assert logger.level == before and capfd.readouterr().err == ""
    assert records == []
    logger.setLevel(logging.INFO)
    try:
        refusal()
        assert logger.level == logging.INFO
        assert records  # somebody wants to know
    finally:
        logger.setLevel(before)
        logger.removeHandler(listener)


def test_a_model_gone_in_the_middle(hub: Hub, tiny: Path, hub_cache: Path) -> None:
    """The cache may be emptied while it is used."""
    hub.publish(ID, tiny)
    resolve()
    shutil.rmtree(hub_cache)
    assert files_of(resolve()) == files_of(tiny)
