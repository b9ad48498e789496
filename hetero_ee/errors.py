"""All errors that the engine raises on purpose: one sentence that names the thing, the number and the way out."""

import difflib
from collections.abc import Iterable

from hetero_ee_profiles.errors import HeteroError as HeteroError
from hetero_ee_profiles.errors import UsageError as UsageError


class ModelError(HeteroError):
    """A model can't be used: folder, configuration, architecture or tokenizer."""


class CheckpointError(ModelError):
    """Weight files are missing, damaged, unsafe, or don't hold the tensors that the configuration promises."""


class StoreError(HeteroError):
    """An int4 store is damaged, was written in another format version, or can't be written."""


class DamagedStoreError(StoreError):
    """A store's content is wrong: a checksum, a size, a value, a field of the manifest."""


class DiskFullError(StoreError):
    """A disk has too little space, found before or during writing; nothing half-written is left."""


class GrammarError(HeteroError):
    """A text can't be held to its grammar any more, since that needs too much time or memory, or leaves no token."""


class DeviceMemoryError(HeteroError):
    """A device has too little free memory; its content is unchanged. device: "cpu" or "gpu"."""

    def __init__(self, message: str, device: str = "gpu") -> None:
        super().__init__(message)
        self.device = device


class DeviceLostError(HeteroError):
    """A device reports an error that no later work on it will survive: a fault, a reset, a removed card."""


def shown(value: object) -> str:
    """Return an external value as messages quote it, shortened."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out integers of more than 4300 digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def meant(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: a similar known name, else all known names."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}."
