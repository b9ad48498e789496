"""Options that say which model is opened and how; what is not given comes from the settings."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_ee.config import Progress
from hetero_ee.config.settings import SETTING_OF, read_settings
from hetero_ee.errors import UsageError

if TYPE_CHECKING:
    from hetero_ee.models.spec import ModelSpec


def _setting(name: str, *short: str) -> Any:
    """The option of a setting; None if not given, so that the environment and the file decide."""
    setting = SETTING_OF[name]
    return typer.Option(*short, setting.flag, help=setting.help)


ModelOption = Annotated[str | None, _setting("model", "-m")]
ModelArgument = Annotated[str | None, typer.Argument(help=SETTING_OF["model"].help, metavar="MODEL")]
RandomWeights = Annotated[
    str | None,
    typer.Option(help="Random weights instead of MODEL: tinyllama-1.1b, llama-2-7b, llama-2-13b or llama-3-8b."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a model is opened."""

    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face id.")] = None
    offline: Annotated[bool | None, _setting("offline")] = None
    quantizer: Annotated[str | None, _setting("quantizer")] = None
    ctx_size: Annotated[int | None, _setting("ctx_size", "-c")] = None
    threads: Annotated[int | None, _setting("threads", "-t")] = None

    def arguments(self, model: str | None) -> dict[str, Any]:
        """As Engine.from_pretrained takes them, settings included. Raises UsageError."""
        settings = read_settings()
        return {
            "model": settings.value("model", model),
            "revision": self.revision,
            "offline": settings.value("offline", self.offline),
            "quantizer": settings.value("quantizer", self.quantizer),
            "context_tokens": settings.value("ctx_size", self.ctx_size),
            "threads": settings.value("threads", self.threads),
        }

    def model_spec(
        self, model: str | None, random_weights: str | None, progress: Progress, *, configuration_only: bool = False
    ) -> "tuple[ModelSpec, str, Path | None]":
        """The model's shapes, its name for people, and its folder, None for random weights. Raises HeteroError.

        configuration_only: nothing else of a Hugging Face id is downloaded.
        """
        from hetero_ee.hub.config_file import read_spec
        from hetero_ee.hub.model_id import model_name
        from hetero_ee.hub.resolve import resolve_model
        from hetero_ee.models.known_shapes import known_spec

        if random_weights is not None:
            if model is not None:
                raise UsageError("MODEL and --random-weights exclude each other; give one.")
            return known_spec(random_weights), f"{random_weights} (random weights)", None
        arguments = self.arguments(model)
        folder = resolve_model(
            arguments["model"],
            offline=arguments["offline"],
            progress=progress,
            configuration_only=configuration_only,
        )
        return read_spec(folder), model_name(folder), folder
