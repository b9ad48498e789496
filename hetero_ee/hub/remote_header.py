"""Read the headers of GGUF files on the Hub, so that unsupported models are refused before they are downloaded."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

from hetero_ee.errors import CheckpointError, ModelError
from hetero_ee.hub.gguf.folder import configuration_folder
from hetero_ee.hub.gguf.header import GgufHeader, read_gguf_header
from hetero_ee.hub.gguf.parts import base_name, joined_header
from hetero_ee.hub.repository import ANSWER_S, RemoteFile, Repository

FIRST_BYTES, MAX_BYTES = 2**20, 2**26  # size of the first request, and the limit; published headers have up to 20 MB


def remote_configuration(repository: Repository, files: Sequence[RemoteFile]) -> Path:
    """Return a cached folder that holds only the configuration of a GGUF model on the Hub.

    Args:
        files: the model's file, or all parts of a split model.

    Raises:
        ModelError, CheckpointError: if the model is unsupported or damaged.
        Exception: any error of huggingface_hub.
    """
    name, identity = base_name(Path(files[0].name)), [repository.model, *(file.digest or file.name for file in files)]

    def header() -> GgufHeader:
        with tempfile.TemporaryDirectory() as folder:
            headers = [_header(repository, file, Path(folder)) for file in files]
        return joined_header(headers)

    try:
        return configuration_folder(header, name, identity)
    except ModelError as error:
        raise type(error)(f"{repository.model} cannot be used: {error}") from error


def _header(repository: Repository, file: RemoteFile, folder: Path) -> GgufHeader:
    """Download and parse the header, doubling the number of bytes until the header is complete."""
    beginning, n_bytes = folder / Path(file.name).name, FIRST_BYTES
    beginning.touch()
    while True:
        _append(repository, file, beginning, min(n_bytes, file.size_bytes))
        try:
            header, name = read_gguf_header(beginning, file.size_bytes), Path(file.name)
            return replace(header, file=name, header_bytes={name: header.header_bytes[beginning]})
        except CheckpointError as error:
            if n_bytes >= min(file.size_bytes, MAX_BYTES):
                raise CheckpointError(str(error).replace(str(beginning), file.name)) from error
        n_bytes *= 2


def _append(repository: Repository, file: RemoteFile, beginning: Path, n_bytes: int) -> None:
    """Extend the local file `beginning` to the first `n_bytes` of the file on the Hub."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    n_done = beginning.stat().st_size
    wanted = build_hf_headers() | {"Range": f"bytes={n_done}-{n_bytes - 1}", "Accept-Encoding": "identity"}
    url = hf_hub_url(repository.model, file.name, revision=repository.commit)
    with (
        get_session().stream("GET", url, headers=wanted, follow_redirects=True, timeout=ANSWER_S) as response,
        beginning.open("ab") as opened,
    ):
        hf_raise_for_status(response)
        if response.status_code != HTTPStatus.PARTIAL_CONTENT:  # the server ignored the range and sent the whole file
            n_done = opened.truncate(0)
        for chunk in response.iter_bytes():
            n_done += opened.write(chunk[: n_bytes - n_done])
            if n_done >= n_bytes:
                break
