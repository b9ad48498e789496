"""List the files of a repository on the Hub, choose those that make up the model, and check that they can be read."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hetero_ee.errors import CheckpointError, ModelError, shown
from hetero_ee.hub.config_file import ADAPTER_FILE, MAX_CONFIG_BYTES
from hetero_ee.hub.gguf.published import PublishedGguf, choose
from hetero_ee.hub.model_files import (
    CONFIG_FILE,
    INDEX_FILE,
    MAX_SMALL_FILE_BYTES,
    QUANTIZE_FILE,
    SINGLE_FILE,
    SMALL_FILES,
    TOKENIZER_FILES,
    indexed_files,
)
from hetero_ee.hub.model_id import ModelId, is_commit

ANSWER_S = 10.0  # for the Hub's answer; huggingface_hub limits the time of downloads itself
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in a repository's listing."""

    name: str
    size_bytes: int
    digest: str = ""  # SHA-256 of a large file, git's SHA-1 of a small one; "" if unknown

    @property
    def is_resumed(self) -> bool:
        """Whether a later run resumes an interrupted download. Only GGUF files are: they are often one large file."""
        return self.name.endswith(".gguf") and len(self.digest) == 64

    @classmethod
    def listed(cls, file: Any) -> Self:
        """Convert huggingface_hub's RepoSibling. Raises: TypeError: for values of unexpected types."""
        if not isinstance(file.size, int):
            raise TypeError(f"size {shown(file.size)}")
        digest = file.lfs.sha256 if file.lfs else file.blob_id
        return cls(file.rfilename, file.size, digest if _DIGEST.fullmatch(digest or "") else "")


@dataclass(frozen=True, slots=True)
class Repository:
    """One commit of a model's repository, with all of its files by name."""

    model: str
    commit: str
    files: Mapping[str, RemoteFile]

    @classmethod
    def of(cls, model: ModelId) -> Self:
        """Request the listing from the Hub. Raises: huggingface_hub's errors, and TypeError for unexpected values."""
        from huggingface_hub import HfApi

        info = HfApi().model_info(model.name, revision=model.revision, files_metadata=True, timeout=ANSWER_S)
        if not is_commit(info.sha):
            raise TypeError(f"commit {shown(info.sha)}")
        return cls(model.name, str(info.sha), {f.rfilename: RemoteFile.listed(f) for f in info.siblings or ()})

    @property
    def has_index(self) -> bool:
        """Whether the weights are several files with an index. A single weight file takes precedence, as in folders."""
        return SINGLE_FILE not in self.files and INDEX_FILE in self.files

    def gguf_model(self, wanted: str | None) -> PublishedGguf | None:
        """Return the GGUF model to run, or None to run the repository's safetensors.

        Args:
            wanted: quantization or file of a GGUF model. None prefers safetensors.

        Raises:
            ModelError: if there is no such GGUF model.
        """
        has_safetensors = SINGLE_FILE in self.files or INDEX_FILE in self.files
        models = [] if wanted is None and has_safetensors else PublishedGguf.listed(self.files)
        if wanted and not models:
            raise ModelError(f"{self.model} has no GGUF model, so there is no {shown(wanted)}; give {self.model}.")
        return choose(models, wanted, self.model) if models else None

    def small_files(self) -> list[RemoteFile]:
        """Return the configuration, the tokenizer's files, and the index if the weights are in several files.

        Raises: ModelError, CheckpointError: the repository does not hold a supported model.
        """
        self._check_kind()
        index = (INDEX_FILE,) if self.has_index else ()
        chosen = [self.files[name] for name in (*SMALL_FILES, QUANTIZE_FILE, *index) if name in self.files]
        for file in chosen:
            largest = MAX_CONFIG_BYTES if file.name in (CONFIG_FILE, QUANTIZE_FILE) else MAX_SMALL_FILE_BYTES
            if file.size_bytes > largest:
                raise ModelError(f"{self.model}: {file.name} has {file.size_bytes} bytes; it has at most {largest}.")
        return chosen

    def weight_files(self, index: Path | None) -> list[RemoteFile]:
        """Return the safetensors files. `index` is the path of the downloaded INDEX_FILE. Raises: CheckpointError."""
        names = indexed_files(index) if index else [SINGLE_FILE]
        for name in names:
            if name not in self.files:
                raise CheckpointError(f"{self.model}: {INDEX_FILE} names {shown(name)}, which is missing.")
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
    """Describe what a repository has instead of readable weights, and say what to do."""
    endings = {Path(name).suffix for name in names if "/" not in name}
    if ADAPTER_FILE in names:
        return "an adapter and no model; merge it into its base model and give the result."
    if ".safetensors" in endings:
        return f"neither {SINGLE_FILE} nor {INDEX_FILE}; give a copy in the format transformers saves."
    if ".gguf" in endings:
        return "only GGUF files that are not whole models, such as image projectors; give another repository."
    if endings & {".bin", ".pt", ".pth"}:
        return "its weights only as pickles, which can run code and are never read; give a copy in safetensors."
    return "no weights in safetensors; give the id of a model."
