"""What a store is made from, and how one that was made from it is found again without reading it all.

Names, sizes and times are not enough: archives, reproducible images and `rsync -t` give other weights the same ones.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from hetero_ee.errors import CheckpointError
from hetero_ee.hub.config_file import read_config_file
from hetero_ee.hub.model_files import INDEX_FILE
from hetero_ee.hub.model_id import model_name
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.checkpoint import weight_files
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.quantizers import QUANTIZER_VERSION, Workers
from hetero_ee.weights.safetensors_file import MAX_HEADER_BYTES
from hetero_ee.weights.store.checksums import sha256_of
from hetero_ee.weights.store.manifest import FORMAT_VERSION
from hetero_ee.weights.store.reader import copied_files
from hetero_ee_profiles.opened_file import open_regular

WHOLE_BYTES = 2**20  # of a file that is its own sample
N_SAMPLES, SAMPLE_BYTES = 256, 64  # spread over a larger one: in 5 GB, two or more in a matrix of 4096 x 4096 bf16


@dataclass(frozen=True, slots=True)
class SourceFile:
    name: str
    n_bytes: int
    mtime_ns: int  # when it was last written, since 1970
    sample_sha256: str  # of its header and of parts of its content, see `_sample`


@dataclass(frozen=True, slots=True)
class Source:
    """What a store is made from: a model's folder as it was when a conversion began."""

    folder: Path
    files: tuple[SourceFile, ...]  # weights, their index, and the small files that a store gets a copy of

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Raises CheckpointError."""
        index = [folder / INDEX_FILE] if (folder / INDEX_FILE).is_file() else []
        files = []
        for file in (*weight_files(folder), *index, *copied_files(folder)):
            with _readable(file) as opened:
                status = os.fstat(opened.fileno())
                sample = _sample(opened, status.st_size)
            files.append(SourceFile(file.name, status.st_size, status.st_mtime_ns, sample))
        return cls(folder, tuple(files))

    def key(self, quantization: Quantization) -> str:
        """Identifies a store by what it would be made from: configuration, file names, sizes, times and samples."""
        config, files = read_config_file(self.folder), [asdict(file) for file in self.files]
        identity = [FORMAT_VERSION, QUANTIZER_VERSION, config, files, asdict(quantization)]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    def provenance(self, spec: ModelSpec, quantization: Quantization) -> dict[str, Any]:
        """What a manifest says of where its store comes from."""
        return {
            "model": model_name(self.folder),
            "architecture": spec.architecture,
            "matrices": quantization.matrices,
            "files": [asdict(file) for file in self.files],
        }

    def digests(self, workers: Workers) -> dict[str, str]:
        """SHA-256 of each file whole, by its name, as model hubs publish it. Raises CheckpointError."""

        def digest(file: SourceFile) -> str:
            with _readable(self.folder / file.name) as opened:
                return sha256_of(opened, 0, file.n_bytes)

        return dict(zip((file.name for file in self.files), workers(digest, self.files), strict=True))

    def check_unchanged(self) -> None:
        """Raises CheckpointError where a file is not as it was."""
        now = Source.of(self.folder).files
        changed = sorted({file.name for file in set(now) ^ set(self.files)})
        if changed:
            raise CheckpointError(
                f"{self.folder / changed[0]} has changed while it was converted; convert again once it is complete."
            )


def _sample(file: BinaryIO, n_bytes: int) -> str:
    """SHA-256 of a small file, or of a large one's header (as safetensors have it) and of parts that lie evenly."""
    if n_bytes <= WHOLE_BYTES:
        return sha256_of(file, 0, n_bytes)
    header_bytes = 8 + int.from_bytes(file.read(8), "little")
    digest = hashlib.sha256(sha256_of(file, 0, min(header_bytes, MAX_HEADER_BYTES)).encode())
    for index in range(N_SAMPLES):
        file.seek((n_bytes - SAMPLE_BYTES) * index // (N_SAMPLES - 1))
        digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


@contextmanager
def _readable(file: Path) -> Iterator[BinaryIO]:
    """The file, open and unbuffered. Raises CheckpointError."""
    try:
        with open_regular(file, buffering=0) as opened:
            yield opened  # a raw file, whose reads may be short only at its end
    except OSError as error:
        raise CheckpointError(f"{file} can't be read ({error}).") from error
