"""What a store is made from: the files of a model's folder as they were when a conversion began."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hetero_ee.errors import CheckpointError
from hetero_ee.hub.model_files import INDEX_FILE
from hetero_ee.weights.checkpoint import weight_files
from hetero_ee.weights.store.reader import copied_files


@dataclass(frozen=True, slots=True)
class SourceFile:
    """mtime_ns: when it was last written, nanoseconds since 1970."""

    name: str
    n_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Source:
    """files: weights, their index, and the small files that a store gets a copy of. None of them is read whole."""

    folder: Path
    files: tuple[SourceFile, ...]

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Raises CheckpointError."""
        index = [folder / INDEX_FILE] if (folder / INDEX_FILE).is_file() else []
        files = []
        for file in (*weight_files(folder), *index, *copied_files(folder)):
            try:
                status = file.stat()
            except OSError as error:
                raise CheckpointError(f"{file} can't be read ({error}).") from error
            files.append(SourceFile(file.name, status.st_size, status.st_mtime_ns))
        return cls(folder, tuple(files))

    def check_unchanged(self) -> None:
        """Raises CheckpointError where a file is not as it was."""
        now = Source.of(self.folder).files
        changed = sorted({file.name for file in set(now) ^ set(self.files)})
        if changed:
            raise CheckpointError(
                f"{self.folder / changed[0]} has changed while it was converted; convert again once it is complete."
            )
