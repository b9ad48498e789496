"""Downloads a large file such that an interrupted download resumes at the next run.

huggingface_hub resumes within a run only. Here its http_get appends to a file next to the cache's blobs. Once complete,
that file becomes the blob, which huggingface_hub then only links to.
"""

import fcntl
import os
from pathlib import Path
from typing import Any

from hetero_ee.hub.repository import RemoteFile, Repository

SUFFIX = ".resumable"
MAX_BYTES = 50 * 10**9  # of a file that the Hub sends by plain HTTP


def resumed_file(blobs: Path, file: RemoteFile) -> Path:
    """Return the path of a file's bytes so far, whether or not there are any."""
    return blobs / (file.digest + SUFFIX)


def download_blob(repository: Repository, file: RemoteFile, blobs: Path, bar: Any) -> None:
    """Download a file to its place among the blobs, continuing an earlier download. Its digest is not checked.

    Does nothing if another process is downloading the file, or if it is too large.

    Args:
        bar: class of the progress bar.

    Raises:
        Exception: whatever huggingface_hub raises.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if file.size_bytes > MAX_BYTES:
        return
    blobs.mkdir(parents=True, exist_ok=True)
    partial = resumed_file(blobs, file)
    with open(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as opened:  # noqa: PTH123 - neither mode of Path
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        n_done = opened.seek(0, os.SEEK_END)
        if n_done > file.size_bytes:
            n_done = opened.seek(0)
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
