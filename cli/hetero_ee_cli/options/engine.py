"""Options that say which model is opened and how; what is not given comes from the settings."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from hetero_ee.config import Progress
from hetero_ee.config.settings import SETTING_OF, read_settings
from hetero_ee.errors import UsageError, shown
from hetero_ee_cli.options.completion import model_names, one_of, shape_names
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.models.spec import ModelSpec


def _setting(name: str, *short: str) -> Any:
    """The option of a setting; None if not given, so that the environment and the file decide."""
    setting = SETTING_OF[name]
    completion = model_names if name == "model" else one_of(setting.choices) if setting.choices else None
    return typer.Option(*short, setting.flag, help=setting.help, autocompletion=completion)


ModelArgument = Annotated[
    str | None, typer.Argument(help="The same as --model.", metavar="MODEL", autocompletion=model_names)
]
RandomWeights = Annotated[
    str | None,
    typer.Option(
        help="Random weights instead of MODEL: tinyllama-1.1b, llama-2-7b, llama-2-13b or llama-3-8b.",
        autocompletion=shape_names,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a model is opened."""

    PANEL: ClassVar[str] = "Model"

    model_flag: Annotated[str | None, _setting("model", "-m")] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face id.")] = None
    offline: Annotated[bool | None, _setting("offline")] = None
    quantizer: Annotated[str | None, _setting("quantizer")] = None
    sparsity: Annotated[
        str | None,
        typer.Option(
            help="exact: skip FFN neurons that are 0 (ReLU); predicted: by a calibrated guess, without their gate; a "
            "number: that share of them; auto: as calibrated. [default: none]"
        ),
    ] = None
    ctx_size: Annotated[int | None, _setting("ctx_size", "-c")] = None
    threads: Annotated[int | None, _setting("threads", "-t")] = None
    profile: Annotated[str | None, _setting("profile")] = None

    def named(self, argument: str | None) -> str | None:
        """The model that the argument or --model names; None where neither does. Raises UsageError."""
        if argument is not None and self.model_flag is not None and argument != self.model_flag:
            raise UsageError(f"two models are named, {shown(argument)} and {shown(self.model_flag)}; name one.")
        return self.model_flag if argument is None else argument

    def arguments(self, model: str | None = None) -> dict[str, Any]:
        """As Engine.from_pretrained takes them, settings included. model: the argument. Raises UsageError."""
        settings = read_settings()
        profile = {} if self.profile is None else {"profile": settings.value("profile", self.profile)}
        return profile | {
            "model": settings.value("model", self.named(model)),
            "revision": self.revision,
            "offline": settings.value("offline", self.offline),
            "quantizer": settings.value("quantizer", self.quantizer),
            "sparsity": self.sparsity,
            "context_tokens": settings.value("ctx_size", self.ctx_size),
            "threads": settings.value("threads", self.threads),
        }

    def model_folder(self, model: str | None, progress: Progress, *, configuration_only: bool = False) -> Path:
        """Where the model lies, downloaded if need be. Raises HeteroError."""
        with ending_at_once():
            from hetero_ee.weights.store.library import model_folder
        from hetero_ee.config import cache_folder

        given = self.arguments(model)
        hub = {"revision": given["revision"], "offline": given["offline"], "configuration_only": configuration_only}
        return model_folder(given["model"], cache_folder(), progress=progress, **hub)

    def model_spec(
        self, model: str | None, random_weights: str | None, progress: Progress, *, configuration_only: bool = False
    ) -> "tuple[ModelSpec, str, Path | None]":
        """The model's shapes, its name for people, and its folder, None for random weights. Raises HeteroError.

        configuration_only: nothing else of a Hugging Face id is downloaded. With --sparsity, FFNs are neuron-major and
        expected to need what was calibrated.
        """
        from hetero_ee.hub.config_file import read_spec
        from hetero_ee.hub.model_id import model_name
        from hetero_ee.models.known_shapes import known_spec

        if random_weights is not None:
            if self.named(model) is not None:
                raise UsageError("MODEL and --random-weights exclude each other; give one.")
            return self._sparse(known_spec(random_weights), None), f"{random_weights} (random weights)", None
        folder = self.model_folder(model, progress, configuration_only=configuration_only)
        return self._sparse(read_spec(folder), folder), model_name(folder), folder

    def _sparse(self, spec: "ModelSpec", folder: Path | None) -> "ModelSpec":
        """As --sparsity says."""
        if self.sparsity is None:
            return spec
        with ending_at_once():
            from hetero_ee.sparsity.applied import planned_sparse
        from hetero_ee.config import cache_folder
        from hetero_ee.sparsity.request import SparsityRequest

        request = SparsityRequest.parsed(self.sparsity)
        assert request is not None, "something was asked"
        return planned_sparse(spec, folder, cache_folder(), self.arguments()["quantizer"], request)
