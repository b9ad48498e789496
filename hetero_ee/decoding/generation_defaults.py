"""Reads a model's generation defaults: sampling parameters and end tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hetero_ee.errors import ModelError, UsageError
from hetero_ee.hub.config_file import read_config_file
from hetero_ee.hub.model_files import CONFIG_FILE
from hetero_ee.hub.regular_file import find_file
from hetero_ee.options import generation_keys
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Fields of generation_config.json, or of config.json, which contained them formerly."""

    file: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the defaults from a model's folder. Raises: ModelError: if the file is invalid."""
        file = find_file(folder, "generation_config.json") or folder / CONFIG_FILE
        return cls(file, read_config_file(file))

    def sampling(self) -> SamplingParams:
        """Return the supported sampling parameters. Raises: ModelError: if a value is invalid."""
        try:
            return SamplingParams.from_hf({k: v for k, v in self.values.items() if k not in generation_keys.ALL})
        except UsageError as error:
            raise ModelError(f"{self.file}: {error}") from error

    def warn_of_ignored(self, context_tokens: int, warn: Callable[[str], None]) -> None:
        """Warn about unsupported fields. context_tokens is the model's maximum context length."""
        if asked := generation_keys.ignored(self.values, context_tokens):
            warn(
                f"{self.file.name} asks for {asked}, which hetero_ee does not do; the text may differ from "
                "that of transformers."
            )

    def eos_token_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the end tokens from generation_config.json, else config.json, else the tokenizer."""
        in_config = read_config_file(self.file.parent).get("eos_token_id")
        for named in (self.values.get("eos_token_id"), in_config, tokenizer.eos_token_id):
            ids = named if isinstance(named, list) else [named]
            if any(isinstance(token_id, int) for token_id in ids):
                return frozenset(token_id for token_id in ids if isinstance(token_id, int))
        return frozenset()
