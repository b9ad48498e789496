"""Which files of a Hugging Face repository make up the model, and which repositories hold none we can read."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from hetero_ee.errors import CheckpointError, ModelError, shown
from hetero_ee.hub.config_file import MAX_CONFIG_BYTES
from hetero_ee.hub.model_files import (
    CONFIG_FILE,
    INDEX_FILE,
    MAX_SMALL_FILE_BYTES,
    SINGLE_FILE,
    SMALL_FILES,
    TOKENIZER_FILES,
)
from hetero_ee.hub.weight_index import indexed_files


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as its repository lists it. digest: SHA-256 of a large file, git's SHA-1 of a small one, "" unknown."""

    name: str
    size_bytes: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Repository:
    """One commit of a model's repository: every file in it, by name."""

    model: str
    commit: str
    files: Mapping[str, RemoteFile]

    @property
    def has_index(self) -> bool:
        """Whether it is the index that names the weight files. A single file counts before it, as in a folder."""
        return SINGLE_FILE not in self.files and INDEX_FILE in self.files

    def small_files(self) -> list[RemoteFile]:
        """The configuration, the tokenizer's files, and the index where the weights are in several files.

        Raises ModelError, CheckpointError where the repository can't be a model of ours.
        """
        self._check_kind()
        index = (INDEX_FILE,) if self.has_index else ()
        chosen = [self.files[name] for name in (*SMALL_FILES, *index) if name in self.files]
        for file in chosen:
            largest = MAX_CONFIG_BYTES if file.name == CONFIG_FILE else MAX_SMALL_FILE_BYTES
            if file.size_bytes > largest:
                raise ModelError(f"{self.model}: {file.name} has {file.size_bytes} bytes; it has at most {largest}.")
        return chosen

    def weight_files(self, index: Path | None) -> list[RemoteFile]:
        """The safetensors files; `index` is where INDEX_FILE lies by now. Raises CheckpointError."""
        if SINGLE_FILE in self.files:
            return [self.files[SINGLE_FILE]]
        names = indexed_files(index) if index else []
        for name in names:
            if name not in self.files:
                raise CheckpointError(f"{self.model}: {INDEX_FILE} names {shown(name)}, which is not there.")
        return [self.files[name] for name in names]

    def _check_kind(self) -> None:
        names = self.files.keys()
        if SINGLE_FILE not in names and INDEX_FILE not in names:
            raise CheckpointError(f"{self.model} holds {_instead_of_weights(names)}")
        if CONFIG_FILE not in names:
            raise ModelError(f"{self.model} has no {CONFIG_FILE}; give a model in Hugging Face's format.")
        if not any(name in names for name in TOKENIZER_FILES):
            raise ModelError(f"{self.model} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there.")


def _instead_of_weights(names: Collection[str]) -> str:
    """What a repository without readable weights has instead, and what to do about it."""
    endings = {Path(name).suffix for name in names if "/" not in name}
    if "adapter_config.json" in names:
        return "an adapter and no model; merge it into its base model and give the result."
    if ".safetensors" in endings:
        return f"neither {SINGLE_FILE} nor {INDEX_FILE}; give a copy in the format transformers saves."
    if ".gguf" in endings:
        return "GGUF files alone, which are quantized already; give the original model."
    if endings & {".bin", ".pt", ".pth"}:
        return (
            "its weights as pickles alone, which can run code when opened and are never read; "
            "give a copy in safetensors."
        )
    return "no weights in safetensors; give the id of a model."
