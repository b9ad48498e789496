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
MAX_SHOWN = 40  # of a repository's quantizations, in one message
_PART = NO_DEVICE + r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,200}"
_FILE = re.compile(rf"(?!.*\.\.)(?:{_PART}/){{0,4}}{_PART}\.gguf")
_OTHER_FILE = re.compile("mmproj|imatrix")  # image projectors, and statistics for quantizers
_QUANTIZATION = re.compile(
    r"(?<![a-z0-9])(?:ud-)?(?:[it]?q[1-8](?:_[a-z0-9]+)*|bf16|fp?16|fp?32|mxfp4(?:_moe)?)(?![a-z0-9_])", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class PublishedGguf:
    """A GGUF model in a list of files: one file, or all parts of a split one, in order."""

    quantization: str  # from the file's name, as written there; the whole name if it has none
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
        """Return whether `wanted` is one of the model's files or, in any case, its quantization."""
        return wanted in self.files or wanted.casefold() == self.quantization.casefold()


def is_model_name(name: str) -> bool:
    """Return whether a GGUF file of that name may hold a model, or a part of one."""
    return _OTHER_FILE.search(name.lower()) is None


def is_gguf_name(name: str) -> bool:
    """Return whether a path in a repository is that of a GGUF file and safe to create."""
    return _FILE.fullmatch(name) is not None


def choose(models: Sequence[PublishedGguf], wanted: str | None, repository: str) -> PublishedGguf:
    """Return the model that `wanted` names by quantization or file, by default the Q4_K_M one, else the first.

    A dynamic quantization such as UD-Q4_K_XL is also found without UD, if there is no other of that name.

    Args:
        models: at least one.

    Raises:
        ModelError: if there is no such model; lists those there are.
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
