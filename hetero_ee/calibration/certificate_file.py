"""Reads and writes certificates: the record certificate.bin in a calibration's folder.

Its arrays are "judgements", compressed with zlib, one exit layer after the other; "prompt_lengths" and "n_tokens", two
bytes per prompt.
"""

import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import numpy as np

from hetero_ee.errors import StoreError
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.exits.certificate import WAY_OUT, Certificate, OnPolicy
from hetero_ee.weights.store.calibration_files import CERTIFICATE_FILE
from hetero_ee.weights.store.filesystem import FileSystem
from hetero_ee.weights.store.record import RecordArrays, RecordKind

MAX_BYTES = 256 * 2**20
MAX_PROMPTS = 10**5
MAX_JUDGEMENTS = 2**28


@dataclass(frozen=True, slots=True)
class CertificateHeader:
    """Header of a certificate: all of it except the arrays."""

    exits_digest: str
    kv_type: str
    text: str
    exit_layers: tuple[int, ...]
    on_policy: tuple[OnPolicy, ...] = ()
    activation_terms: int = 1

    ADDED_FIELDS: ClassVar = ("on_policy", "activation_terms")  # fields that files of this version may lack


CERTIFICATE = RecordKind(CertificateHeader, "certificate", 1, WAY_OUT)


def write_certificate(certificate: Certificate, folder: Path, files: FileSystem | None = None) -> None:
    """Write the certificate to `folder`, completely or not at all, replacing an existing one.

    Raises: StoreError, DiskFullError.
    """
    header = CertificateHeader(*(getattr(certificate, field.name) for field in fields(CertificateHeader)))
    judgements = np.ascontiguousarray(certificate.judgements.T).tobytes()
    arrays = {
        "judgements": np.frombuffer(zlib.compress(judgements, 9), np.uint8),
        "prompt_lengths": certificate.prompt_lengths.astype("<u2").view(np.uint8),
        "n_tokens": certificate.n_tokens.astype("<u2").view(np.uint8),
    }
    CERTIFICATE.write(folder / CERTIFICATE_FILE, certificate.key, header, arrays, files)


def read_certificate(folder: Path, calibration: Calibration, key: str) -> Certificate | None:
    """Return the certificate in `folder`, or None if it has none.

    Raises: StoreError: if the file is damaged, or certifies other exits than the calibration's.
    """
    file = folder / CERTIFICATE_FILE
    found = CERTIFICATE.read(file, key, MAX_BYTES, lambda header, arrays: _certificate(header, arrays, key))
    if found is None:
        return None
    if found.exits_digest != calibration.exits_digest:
        raise StoreError(
            f"the certificate {file} was made for other exit maps and predictors; {WAY_OUT} for this model."
        )
    if found.exit_layers[-1] >= calibration.n_layers:
        raise StoreError(f"the certificate {file} names exit layers that this model does not have; {WAY_OUT} again.")
    return found


def _certificate(header: CertificateHeader, arrays: RecordArrays, key: str) -> Certificate:
    """Return the certificate of a record. Raises: ValueError: if its arrays are inconsistent."""
    prompt_lengths, n_tokens = (
        arrays.take(name, np.uint8).view("<u2").astype(np.uint16) for name in ("prompt_lengths", "n_tokens")
    )
    n_all, n_exit_layers = int(n_tokens.sum()), len(header.exit_layers)
    if not 0 < n_all * n_exit_layers <= MAX_JUDGEMENTS or n_tokens.ndim != 1 or len(n_tokens) > MAX_PROMPTS:
        raise ValueError(f"it has {n_tokens.shape} prompts, {n_all} tokens and {n_exit_layers} exit layers")
    unpacker = zlib.decompressobj()
    try:
        judgements = unpacker.decompress(arrays.take("judgements", np.uint8).tobytes(), n_all * n_exit_layers)
    except zlib.error as error:
        raise ValueError(f"its judgements can't be unpacked: {error}") from error
    if len(judgements) != n_all * n_exit_layers or not unpacker.eof:
        raise ValueError("it has more or fewer judgements than its tokens need")
    by_token = np.ascontiguousarray(np.frombuffer(judgements, np.uint8).reshape(n_exit_layers, n_all).T)
    same = {field.name: getattr(header, field.name) for field in fields(header)}
    return Certificate(key, **same, prompt_lengths=prompt_lengths, n_tokens=n_tokens, judgements=by_token)
