"""Choose one of the GGUF models in a list of files by its quantization, as in org/name:Q4_K_M."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Self

from hetero_ee.errors import ModelError, shown
from hetero_ee.hub.gguf.parts import base_name, part_names
from hetero_ee.hub.model_files import NO_DEVICE

DEFAULT_QUANTIZATION = "Q4_K_M"  # as in llama.cpp
MAX_SHOWN = 40  # quantizations that one message lists at most
_PART = NO_DEVICE + r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,200}"
_FILE = re.compile(rf"(?!.*\.\.)(?:{_PART}/){{0,4}}{_PART}\.gguf")
_OTHER_FILE = re.compile("mmproj|imatrix")  # GGUF files without a model: image projectors and importance matrices
_QUANTIZATION = re.compile(
    r"(?<![a-z0-9])(?:ud-)?(?:[it]?q[1-8](?:_[a-z0-9]+)*|bf16|fp?16|fp?32|mxfp4(?:_moe)?)(?![a-z0-9_])", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class PublishedGguf:
    """A GGUF model in a list of files: a single file, or all parts of a split model in order."""

    quantization: str  # as spelled in the file name; the whole name if it states no quantization
    files: tuple[str, ...]

    @classmethod
    def listed(cls, names: Iterable[str]) -> list[Self]:
        """Return the complete models among file names (with folders), in the order of their first files."""
        known, models = dict.fromkeys(names).keys(), list[Self]()
        for name in known:
            file = PurePosixPath(name)
            if not is_gguf_name(name) or not is_model_name(file.name):
                continue
            files = tuple(str(file.with_name(each)) for each in part_names(file.name))
            if files[:1] == (name,) and known >= set(files):
                stem = base_name(file)
                models.append(cls((_QUANTIZATION.findall(stem) or [stem])[-1], files))
        return models

    def is_called(self, wanted: str) -> bool:
        """Return whether `wanted` is one of the model's files or its quantization, ignoring upper and lower case."""
        return wanted in self.files or wanted.casefold() == self.quantization.casefold()


def is_model_name(name: str) -> bool:
    """Return whether a GGUF file of that name may hold a model, or a part of one."""
    return _OTHER_FILE.search(name.lower()) is None


def is_gguf_name(name: str) -> bool:
    """Return whether a path in a repository is that of a GGUF file and safe to create."""
    return _FILE.fullmatch(name) is not None


def choose(models: Sequence[PublishedGguf], wanted: str | None, repository: str) -> PublishedGguf:
    """Return the model with the wanted quantization or file name.

    A dynamic quantization such as UD-Q4_K_XL is also found as Q4_K_XL, unless another model has that quantization.

    Args:
        models: at least one.
        wanted: quantization or file. None chooses Q4_K_M, or the first model if there is no Q4_K_M.
        repository: name for messages.

    Raises:
        ModelError: if there is no such model; the message lists the existing ones.
    """
    for name in (wanted, f"UD-{wanted}") if wanted else (DEFAULT_QUANTIZATION,):
        for model in models:
            if model.is_called(name):
                return model
    if wanted is None:
        return models[0]
    found = list(dict.fromkeys(model.quantization for model in models))
    more = f" and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
    raise ModelError(
        f"{repository} has no GGUF model {shown(wanted)}; it has {', '.join(found[:MAX_SHOWN])}{more}; "
        f"give one of them as {repository}:{found[0]}."
    )
