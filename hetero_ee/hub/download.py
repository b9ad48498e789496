"""Downloads files of one commit into huggingface_hub's cache, several at once, and checks them.

huggingface_hub transfers and caches the files. This module ends a download within a second after Ctrl-C and
leaves no half-written files, compares digests, and counts the progress of all files together.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import psutil

from hetero_ee.config import DOWNLOADING, Progress
from hetero_ee.errors import CheckpointError
from hetero_ee.hub.errors import is_transient
from hetero_ee.hub.model_files import CONFIG_FILE
from hetero_ee.hub.model_id import CACHED_PREFIX, is_commit
from hetero_ee.hub.repository import RemoteFile, Repository
from hetero_ee.hub.resumed import download_blob, resumed_file
from hetero_ee_profiles.opened_file import open_regular

# huggingface_hub keeps nothing of an interrupted file. Fewer than its own 8 at once are as fast, and lose less.
N_CONNECTIONS = 4
N_ATTEMPTS = 3
STOP_S = 1.0  # longest wait for running requests after Ctrl-C
REPORT_S = 0.1
PAUSE_S = 1.0  # before the first retry; later pauses are longer

T = TypeVar("T")


class Download:
    """Downloads the files of one repository that are not in the cache yet."""

    def __init__(self, repository: Repository, progress: Progress | None) -> None:
        self._repository, self._progress = repository, progress
        self._stage = f"{DOWNLOADING} {repository.model}"
        self._stopped = threading.Event()
        self._done_bytes: dict[str, int] = {}
        self._announced_bytes = 0
        self._unchecked: list[str] = []

    def announce(self, files: Sequence[RemoteFile]) -> None:
        """Start to report progress, with the missing bytes of `files` as the total."""
        self._done_bytes.clear()
        self._announced_bytes = self.missing_bytes(files)

    def fetch(self, files: Sequence[RemoteFile]) -> None:
        """Download the files and return when all have arrived.

        Ends within STOP_S after an error or Ctrl-C, except for threads that hang in a request.

        Raises:
            CheckpointError: A file keeps arriving damaged.
            Exception: Whatever huggingface_hub raises.
        """
        waiting, failures = iter(files), list[BaseException]()
        threads = [
            threading.Thread(target=self._work, args=(waiting, failures), daemon=True)
            for _ in range(min(N_CONNECTIONS, len(files)))
        ]
        try:
            for thread in threads:
                thread.start()
            while not failures and (running := [thread for thread in threads if thread.is_alive()]):
                running[0].join(REPORT_S)
                self._report()
            if failures:
                raise failures[0]
            self._report()
        except BaseException:
            self._stop(threads)
            raise

    def fetch_one(self, file: RemoteFile) -> Path:
        """Download one file as `fetch` does and return its path."""
        self.fetch([file])
        path = self._cached(file)
        if path is None:
            raise CheckpointError(
                f"{self._repository.model}: {file.name} was removed from the cache already; try again."
            )
        return path

    def tell_unchecked(self) -> None:
        """Report, in one line, the files that came without a digest to compare with."""
        if self._unchecked and self._progress:
            n_files, last = len(self._unchecked), self._unchecked[-1]  # weights come last
            files = last if n_files == 1 else f"{n_files} files, {last} among them,"
            self._progress(f"{self._repository.model}: {files} came without a checksum; only sizes were checked", 0, 0)

    def name_revision(self, revision: str, file: str = CONFIG_FILE) -> None:
        """Record in the cache that the branch or tag `revision` points to this commit, so that offline runs find it.

        Args:
            file: any downloaded file of the commit.
        """
        with suppress(Exception):  # only an offline run would miss the name
            self._ask_for(file, revision)

    def is_cached(self, file: RemoteFile) -> bool:
        """Return whether the file is in the cache with the right size."""
        path = self._cached(file)
        return path is not None and path.stat().st_size == file.size_bytes

    def missing_bytes(self, files: Sequence[RemoteFile]) -> int:
        """Return the number of bytes to transfer. Files that the cache holds for another commit don't count."""
        blobs = self._blobs()
        absent = [file for file in files if not self.is_cached(file) and not (blobs / (file.digest or ".")).is_file()]
        return sum(file.size_bytes for file in absent)

    def resumed_bytes(self, files: Sequence[RemoteFile]) -> int:
        """Return how many bytes of `files` earlier, interrupted downloads left on the disk."""
        partial = [resumed_file(self._blobs(), file) for file in files if file.is_resumed and not self.is_cached(file)]
        return sum(file.stat().st_size for file in partial if file.is_file())

    def _work(self, waiting: Iterator[RemoteFile], failures: list[BaseException]) -> None:
        """Fetch files from the shared iterator until none is left. Runs in each download thread."""
        try:
            while not self._stopped.is_set() and (file := next(waiting, None)):
                retried(partial(self._fetch, file), self._stopped.wait)
        except BaseException as error:
            failures.append(error)

    def _fetch(self, file: RemoteFile) -> None:
        if self.is_cached(file):
            return
        is_damaged = self._cached(file) is not None  # the cached file has a wrong size
        if file.is_resumed and not is_damaged and not (self._blobs() / file.digest).is_file():
            download_blob(self._repository, file, self._blobs(), self._bar(file.name))
        self._check(self._ask_for(file.name, self._repository.commit, again=is_damaged), file)

    def _ask_for(self, name: str, revision: str, again: bool = False) -> Path:
        """Let huggingface_hub download the file unless it is cached, and return its path."""
        from huggingface_hub import hf_hub_download

        model, bar = self._repository.model, self._bar(name)
        return Path(hf_hub_download(model, name, revision=revision, force_download=again, tqdm_class=bar))

    def _bar(self, name: str) -> Any:
        return type("Bar", (_Bar,), {"download": self, "file_name": name})

    def _check(self, path: Path, file: RemoteFile) -> None:
        """Compare a file's size and digest with the listing. huggingface_hub checks only the size in HTTP headers."""
        size_bytes = path.stat().st_size
        if size_bytes == file.size_bytes and self._digest(path, file) == file.digest:
            return
        for link in (path.resolve(), path):
            link.unlink(missing_ok=True)
        raise CheckpointError(
            f"{self._repository.model}: {file.name} arrived damaged, with {size_bytes} bytes where {file.size_bytes} "
            "are listed, or with other bytes, and was not kept; try again."
        )

    def _digest(self, path: Path, file: RemoteFile) -> str:
        if not file.digest:
            self._unchecked.append(file.name)
            return ""
        is_sha256 = len(file.digest) == 64
        digest = hashlib.sha256() if is_sha256 else hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)
        with open_regular(path) as opened:
            return hashlib.file_digest(opened, lambda: digest).hexdigest()

    def go_on(self, name: str, n_bytes: int) -> None:
        """Count transferred bytes of a file. Raises: _StoppedError: if the download was stopped."""
        if self._stopped.is_set():
            raise _StoppedError
        self._done_bytes[name] = self._done_bytes.get(name, 0) + n_bytes

    def begin(self, name: str, n_bytes: int) -> None:
        """Reset a file's byte count when its transfer starts or restarts: `n_bytes` are on the disk already."""
        self._done_bytes[name] = n_bytes

    def _report(self) -> None:
        if self._progress and self._announced_bytes:
            done_bytes = sum(self._done_bytes.copy().values())
            self._progress(self._stage, min(done_bytes, self._announced_bytes), self._announced_bytes)

    def _stop(self, threads: Sequence[threading.Thread]) -> None:
        self._stopped.set()
        _abort_xet()
        deadline_s = time.monotonic() + STOP_S
        for thread in filter(threading.Thread.is_alive, threads):
            thread.join(max(0, deadline_s - time.monotonic()))
        if any(map(threading.Thread.is_alive, threads)):
            self._remove_partial_files()

    def _remove_partial_files(self) -> None:
        """Remove the files that threads are still writing, since the process may end before they do.

        Only files with a random part in their names are removed: no later run resumes them. Releases of huggingface_hub
        before 1.18 write names without one and resume them.
        """
        with suppress(psutil.Error, OSError):
            for opened in psutil.Process().open_files():
                file = Path(opened.path)
                is_random = file.name.count(".") == 2 and file.suffix == ".incomplete"
                if is_random and file.parent == self._blobs().resolve():
                    file.unlink(missing_ok=True)

    def _cached(self, file: RemoteFile) -> Path | None:
        return cached_file(self._repository.model, file.name, self._repository.commit)

    def _blobs(self) -> Path:
        """Return the repository's cache folder that holds files' contents, named by digest."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / (CACHED_PREFIX + self._repository.model.replace("/", "--")) / "blobs"


class _Bar:
    """Progress bar that huggingface_hub calls, subclassed for each file. Counts bytes and draws nothing."""

    download: ClassVar[Download]
    file_name: ClassVar[str]

    def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
        self.download.begin(self.file_name, initial)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, n_bytes: int = 1) -> None:
        self.download.go_on(self.file_name, n_bytes)

    def ignore(self, *_: Any, **__: Any) -> None:
        pass

    close = update_transfer = set_postfix_str = set_transfer_postfix_str = refresh = ignore


class _StoppedError(Exception):
    """Ends the transfer in a thread of a stopped download. Users never see it."""


def cached_file(model: str, name: str, revision: str) -> Path | None:
    """Return the path of a revision's file in the cache of huggingface_hub, None if it is not cached."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(model, name, revision=revision)
    return Path(path) if isinstance(path, str) else None


def cached_snapshot(model: str, revision: str) -> Path | None:
    """Return the folder of a revision in the cache of huggingface_hub, None if no file of it is cached."""
    from huggingface_hub import constants

    repository = Path(constants.HF_HUB_CACHE) / (CACHED_PREFIX + model.replace("/", "--"))
    try:
        commit = revision if is_commit(revision) else (repository / "refs" / revision).read_text()
        folder = repository / "snapshots" / commit
        return folder if is_commit(commit) and folder.is_dir() else None
    except (OSError, ValueError):  # not cached, or damaged
        return None


def retried(attempt: Callable[[], T], wait: Callable[[float], object], n_attempts: int = N_ATTEMPTS) -> T:
    """Call `attempt` until it succeeds and return its result. Only errors that may pass are retried.

    Args:
        wait: Waits for the given seconds. Returns True to give up.
        n_attempts: Maximum number of calls.
    """
    for number in range(1, n_attempts):
        try:
            return attempt()
        except Exception as error:
            if not is_transient(error) or wait(number * PAUSE_S):
                raise
    return attempt()


def _abort_xet() -> None:
    """Abort Xet's transfers, which run outside of Python. huggingface_hub does so only if it receives Ctrl-C itself."""
    with suppress(ImportError, AttributeError):
        from huggingface_hub.utils._xet import abort_xet_session

        abort_xet_session()  # type: ignore[no-untyped-call]
