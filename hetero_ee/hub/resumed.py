"""Downloads a large file such that an interrupted download resumes at the next run.

huggingface_hub resumes within a run only. Here its http_get appends to a file next to the cache's blobs. Once complete,
that file becomes the blob, which huggingface_hub then only links to.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_ee.hub.repository import RemoteFile, Repository

SUFFIX = ".resumable"
MAX_BYTES = 50 * 10**9  # of a file that the Hub sends by plain HTTP
POLL_S = 0.1


def resumed_file(blobs: Path, file: RemoteFile) -> Path:
    """Return the path of a file's bytes so far, whether or not there are any."""
    return blobs / (file.digest + SUFFIX)


def download_blob(repository: Repository, file: RemoteFile, blobs: Path, bar: Any) -> None:
    """Download a file to its place among the blobs, continuing an earlier download. Its digest is not checked.

    Waits while another process downloads the file. Does nothing if the file is too large or the disk has no locks.

    Args:
        bar: class of the progress bar. Its `update` ends the wait by raising an error.

    Raises:
        Exception: whatever huggingface_hub or `bar` raises.
    """
    import filelock

    if file.size_bytes > MAX_BYTES:
        return
    blobs.mkdir(parents=True, exist_ok=True)
    lock, waiting = filelock.FileLock(f"{resumed_file(blobs, file)}.lock", fallback_to_soft=False), bar()
    try:
        held = lock.acquire(poll_interval=POLL_S, cancel_check=lambda: waiting.update(0))
    except (OSError, NotImplementedError):
        return
    with held:
        if (blobs / file.digest).is_file():
            bar(initial=file.size_bytes)
        else:
            _resume(repository, file, blobs, bar)
        with suppress(OSError):  # Windows keeps an open file
            Path(lock.lock_file).unlink()


def _resume(repository: Repository, file: RemoteFile, blobs: Path, bar: Any) -> None:
    """Download what is missing of a file. The caller holds its lock."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    partial = resumed_file(blobs, file)
    with partial.open("ab") as opened:
        n_done = opened.tell()
        if n_done > file.size_bytes:
            n_done = opened.seek(opened.truncate(0))
        http_get(
            hf_hub_url(repository.model, file.name, revision=repository.commit),
            opened,
            resume_size=n_done,
            headers=build_hf_headers(),
            expected_size=file.size_bytes,
            tqdm_class=bar,
        )
        opened.truncate(file.size_bytes)
    partial.replace(blobs / file.digest)
