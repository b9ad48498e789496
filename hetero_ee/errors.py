"""All errors that the engine raises on purpose. Each message is one sentence with the thing, the number and the way
out."""

import difflib
from collections.abc import Iterable

from hetero_ee_profiles.errors import HeteroError as HeteroError
from hetero_ee_profiles.errors import UsageError as UsageError


class ModelError(HeteroError):
    """A model's folder, configuration, architecture or tokenizer can't be used."""


class CheckpointError(ModelError):
    """Weight files are missing, damaged or unsafe, or lack tensors that the configuration requires."""


class StoreError(HeteroError):
    """An int4 store is damaged, was written in another format version, or can't be written."""


class DamagedStoreError(StoreError):
    """A store has a wrong checksum, size, value or field of its manifest."""


class DiskFullError(StoreError):
    """A disk has too little space, found before or during writing. Partly written files are removed."""


class GrammarError(HeteroError):
    """A grammar can't be enforced any more: it needs too much time or memory, or allows no token."""


class DeviceMemoryError(HeteroError):
    """A device ("cpu" or "gpu") has too little free memory. The data on it is unchanged."""

    def __init__(self, message: str, device: str = "gpu") -> None:
        super().__init__(message)
        self.device = device


class DeviceLostError(HeteroError):
    """A device has failed for good: by a fault, a reset or removal of the card. No later work on it can succeed."""


def shown(value: object) -> str:
    """Return an external value, shortened, as it is quoted in messages."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out integers of more than 4300 digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def meant(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: a similar known name, else all known names."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}."
