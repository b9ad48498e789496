"""The metadata entries of a GGUF file that describe its model; their keys begin with the architecture's name."""

from typing import Any

from hetero_ee.errors import ModelError
from hetero_ee.hub.gguf.header import GgufHeader


class Metadata:
    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.name: Any = header.metadata.get("general.architecture")

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.name}.{key}")

    def even(self, key: str) -> Any:
        """Return the value; if there is a list with one value per layer, they must all be equal."""
        value = self.get(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.failure(f"{self.name}.{key} differs from layer to layer, which is not supported")
            return value[0]
        return value

    def needed(self, key: str) -> Any:
        value = self.even(key)
        if value is None:
            raise self.failure(f"{self.name}.{key} is missing")
        return value

    def has_tensor(self, name: str) -> bool:
        return name in self.header.tensors

    def failure(self, what: str) -> ModelError:
        return ModelError(f"{self.header.file}: {what}.")
