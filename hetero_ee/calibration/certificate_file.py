"""A certificate on disk: the recorded file certificate.bin in a calibration's folder.

Its arrays are "judgements", packed by zlib, the exit layers one after the other; "prompt_lengths" and "n_tokens", two
bytes a prompt.
"""

import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import numpy as np

from hetero_ee.calibration.recorded_file import read_recorded, require_version, write_recorded
from hetero_ee.calibration.tensor_files import Arrays
from hetero_ee.errors import StoreError
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.exits.certificate import WAY_OUT, Certificate, OnPolicy
from hetero_ee.weights.store.calibration_files import CERTIFICATE_FILE
from hetero_ee.weights.store.filesystem import FileSystem

FORMAT_VERSION = 1
MAX_BYTES = 256 * 2**20
MAX_PROMPTS = 10**5
MAX_JUDGEMENTS = 2**28


@dataclass(frozen=True, slots=True)
class CertificateRecord:
    """What a certificate holds beside its arrays."""

    version: int
    key: str
    exits_digest: str
    kv_type: str
    text: str
    exit_layers: tuple[int, ...]
    on_policy: tuple[OnPolicy, ...] = ()

    ADDED_FIELDS: ClassVar = ("on_policy",)  # that a file of this version may lack

    @staticmethod
    def check_version(version: object) -> None:
        require_version(version, FORMAT_VERSION)


def write_certificate(certificate: Certificate, folder: Path, files: FileSystem | None = None) -> None:
    """In `folder`, whole or not at all, replacing what was there. Raises StoreError, DiskFullError."""
    known = certificate
    names = (field.name for field in fields(CertificateRecord) if field.name != "version")
    record = CertificateRecord(FORMAT_VERSION, *(getattr(known, name) for name in names))
    arrays = {
        "judgements": np.frombuffer(zlib.compress(np.ascontiguousarray(known.judgements.T).tobytes(), 9), np.uint8),
        "prompt_lengths": known.prompt_lengths.astype("<u2").view(np.uint8),
        "n_tokens": known.n_tokens.astype("<u2").view(np.uint8),
    }
    write_recorded(record, arrays, folder / CERTIFICATE_FILE, files)


def read_certificate(folder: Path, calibration: Calibration, key: str) -> Certificate | None:
    """The certificate in `folder`, None where there is none. Raises StoreError, in one sentence with the way out, for
    one that is damaged, of another version, or of other weights or exits."""
    file = folder / CERTIFICATE_FILE
    try:
        read = read_recorded(CertificateRecord, file, MAX_BYTES, "a certificate")
        if read is None:
            return None
        found = _parsed(*read)
    except (ValueError, zlib.error) as error:
        raise StoreError(f"the certificate {file} is damaged ({error}); {WAY_OUT} again.") from error
    if found.key != key or found.exits_digest != calibration.exits_digest:
        what = "weights" if found.key != key else "exit maps and predictors"
        raise StoreError(f"the certificate {file} is of other {what} than these; {WAY_OUT} for this model.")
    if found.exit_layers[-1] >= calibration.n_layers:
        raise StoreError(f"the certificate {file} names exit layers that this model has not; {WAY_OUT} again.")
    return found


def _parsed(record: CertificateRecord, arrays: Arrays) -> Certificate:
    """Raises ValueError, zlib.error."""
    if set(arrays) != {"judgements", "prompt_lengths", "n_tokens"}:
        raise ValueError("arrays are missing, or there are others")
    if any(array.dtype != np.uint8 or array.ndim != 1 for array in arrays.values()):
        raise ValueError("an array is of another type or shape")
    prompt_lengths, n_tokens = (arrays[name].view("<u2").astype(np.uint16) for name in ("prompt_lengths", "n_tokens"))
    n_all, n_exit_layers = int(n_tokens.sum()), len(record.exit_layers)
    if not 0 < n_all * n_exit_layers <= MAX_JUDGEMENTS or len(n_tokens) > MAX_PROMPTS:
        raise ValueError(f"it is of {len(n_tokens)} prompts, {n_all} tokens and {n_exit_layers} exit layers")
    unpacker = zlib.decompressobj()
    judgements = unpacker.decompress(arrays["judgements"].tobytes(), n_all * n_exit_layers)
    if len(judgements) != n_all * n_exit_layers or not unpacker.eof:
        raise ValueError("its judgements are more or fewer than its tokens")
    return Certificate(
        record.key,
        record.exits_digest,
        record.kv_type,
        record.text,
        record.exit_layers,
        prompt_lengths,
        n_tokens,
        np.ascontiguousarray(np.frombuffer(judgements, np.uint8).reshape(n_exit_layers, n_all).T),
        record.on_policy,
    )
