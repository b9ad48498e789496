"""Download large files so that the next run resumes an interrupted download.

huggingface_hub resumes only within one run. Here its http_get appends to a partial file next to the blobs in its cache.
The complete file is renamed to the blob, and huggingface_hub then only links to it.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_ee.hub.repository import RemoteFile, Repository

SUFFIX = ".resumable"
MAX_BYTES = 50 * 10**9  # largest file that the Hub sends by plain HTTP
POLL_S = 0.1


def resumed_file(blobs: Path, file: RemoteFile) -> Path:
    """Return the path of the partial file, which may not exist."""
    return blobs / (file.digest + SUFFIX)


def download_blob(repository: Repository, file: RemoteFile, blobs: Path, bar: Any) -> None:
    """Download a file into the cache's blobs, resuming an earlier download. The caller must check the digest.

    Waits while another process downloads the same file. Does nothing if the file exceeds MAX_BYTES or the file system
    has no locks, so that huggingface_hub downloads it.

    Args:
        bar: class of the progress bar. While waiting, its `update` is called and may raise an error to stop.

    Raises:
        Exception: any error of huggingface_hub or `bar`.
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
        with suppress(OSError):  # Windows does not delete a file that another process has open
            Path(lock.lock_file).unlink()


def _resume(repository: Repository, file: RemoteFile, blobs: Path, bar: Any) -> None:
    """Download the missing bytes of a file. The caller must hold its lock."""
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
