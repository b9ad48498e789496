"""Identify the model files that a store is made from, so that the store is found again without reading all of them."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from hetero_ee.errors import CheckpointError
from hetero_ee.hub.config_file import read_config_file
from hetero_ee.hub.model_files import INDEX_FILE
from hetero_ee.hub.model_id import model_name
from hetero_ee.models.families.qwen3_5 import MTP_FIELD, NEXT
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.checkpoint import weight_files
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.quantizers import Workers
from hetero_ee.weights.store.checksums import sha256_of
from hetero_ee.weights.store.manifest import FORMAT_VERSION
from hetero_ee.weights.store.reader import copied_files
from hetero_ee.weights.store.source_file import SourceFile, readable

# Markers in a store's key, with the words of configurations that add them: earlier versions stored such models without
# what the comment names.
MARKERS = {
    "MTP": (MTP_FIELD, NEXT),  # the MTP layer
    "latent": ("kv_lora_rank",),  # key_up and value_up as two matrices
}


@dataclass(frozen=True, slots=True)
class Source:
    """A model's folder as it was when a conversion began."""

    folder: Path
    files: tuple[SourceFile, ...]  # weights, their index, and the small files that a store gets a copy of

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Record the names, sizes, times and samples of the model files in `folder`. Raises: CheckpointError."""
        return cls(folder, tuple(map(SourceFile.of, _paths(folder))))

    def key(self, quantization: Quantization) -> str:
        """Return the store's key, a hash of the configuration, the quantization and the recorded files."""
        config, files = read_config_file(self.folder), [asdict(file) for file in self.files]
        identity = [FORMAT_VERSION, quantization.version, config, files, quantization.identity]
        text = json.dumps(config)
        identity += [marker for marker, words in MARKERS.items() if any(word in text for word in words)]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    def provenance(self, spec: ModelSpec, quantization: Quantization) -> dict[str, Any]:
        """Return the manifest's description of the model that the store was made from."""
        return {
            "model": model_name(self.folder),
            "architecture": spec.architecture,
            "matrices": quantization.matrices,
            "files": [asdict(file) for file in self.files],
        }

    def digests(self, workers: Workers) -> dict[str, str]:
        """Return the SHA-256 of each whole file, by name, as model hubs publish it. Raises: CheckpointError."""
        paths = {path.name: path for path in _paths(self.folder)}

        def digest(file: SourceFile) -> str:
            with readable(paths.get(file.name, self.folder / file.name)) as opened:  # a file that is gone can't be read
                return sha256_of(opened, 0, file.n_bytes)

        return dict(zip((file.name for file in self.files), workers(digest, self.files), strict=True))

    def check_unchanged(self) -> None:
        """Check that no file has changed since it was recorded. Raises: CheckpointError."""
        now = Source.of(self.folder).files
        changed = sorted({file.name for file in set(now) ^ set(self.files)})
        if changed:
            raise CheckpointError(
                f"{self.folder / changed[0]} changed during the conversion; convert again once it is complete."
            )


def _paths(folder: Path) -> list[Path]:
    """Return the paths of the weight files, their index and the small files."""
    index = [folder / INDEX_FILE] if (folder / INDEX_FILE).is_file() else []
    return [*weight_files(folder), *index, *copied_files(folder)]
