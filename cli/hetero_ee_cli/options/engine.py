"""Options for the model and the way it is opened."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from hetero_ee.config import Progress
from hetero_ee.config.settings import read_settings
from hetero_ee.errors import UsageError, shown
from hetero_ee.hub.model_files import CONFIG_FILE
from hetero_ee.options.engine import ACTIVATION_TERMS, MODEL, MODEL_OPTIONS, PROFILE, SETTINGS
from hetero_ee_cli.options.flags import OptionGroup, model_names, shape_names
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.models.spec import ModelSpec


MODEL_FLAG = "model_flag"  # `model` is the argument
ModelArgument = Annotated[
    str | None, typer.Argument(help="The same as --model.", metavar="MODEL", autocompletion=model_names)
]
RandomWeights = Annotated[
    str | None,
    typer.Option(
        help="Random weights in a known shape, such as llama-3.1-8b, instead of MODEL. An unknown name lists all.",
        autocompletion=shape_names,
    ),
]


class ModelOptions(OptionGroup):
    """Options for the model and the way it is opened. An option that is not given has the value in the settings."""

    PANEL: ClassVar = "Model"
    OPTIONS: ClassVar = {MODEL_FLAG: MODEL} | MODEL_OPTIONS
    COMPLETIONS: ClassVar = {MODEL_FLAG: model_names}

    def named(self, argument: str | None) -> str | None:
        """Return the model named by the argument or --model, or None."""
        flag: str | None = self.given.get(MODEL_FLAG)
        if argument is not None and flag is not None and argument != flag:
            raise UsageError(f"two models are named, {shown(argument)} and {shown(flag)}; name one.")
        return flag if argument is None else argument

    def model_and_prompt(self, model: str | None, prompt: str | None) -> tuple[str | None, str | None]:
        """Return the arguments MODEL and PROMPT. If --model is given, a single argument is the prompt."""
        return (None, model) if MODEL_FLAG in self.given and prompt is None else (model, prompt)

    def arguments(self, model: str | None = None) -> dict[str, Any]:
        """Return the keyword arguments of `Engine.from_pretrained`, including settings.

        `model` is the command's argument.
        """
        settings, found = read_settings(), {"model": self.named(model)} | self.given
        found.pop(MODEL_FLAG, None)
        for option in SETTINGS.values():
            if option.name in ("model", *MODEL_OPTIONS) and (option is not PROFILE or PROFILE.name in found):
                found[option.name] = settings.value(option.setting, found.get(option.name))
        return found

    def model_folder(self, model: str | None, progress: Progress, *, configuration_only: bool = False) -> Path:
        """Return the model's folder. The model is downloaded if necessary.

        If configuration_only is true, only its configuration, and the folder's config.json may be named instead.
        """
        with ending_at_once():
            from hetero_ee.weights.store.library import model_folder
        from hetero_ee.config import cache_folder

        given = self.arguments(model)
        named = given["model"]
        if configuration_only and named is not None and Path(named).name == CONFIG_FILE:
            named = Path(named).parent
        return model_folder(
            named,
            cache_folder(),
            revision=given.get("revision"),
            offline=given["offline"],
            progress=progress,
            configuration_only=configuration_only,
        )

    def model_spec(
        self, model: str | None, random_weights: str | None, progress: Progress, *, configuration_only: bool = False
    ) -> "tuple[ModelSpec, str, Path | None]":
        """Return the model's shapes, its name for people, and its folder, which is None for random weights.

        With --sparsity, FFNs are neuron-major and expected to use the calibrated share of neurons. --activations counts
        too. If configuration_only is true, only the configuration of a Hugging Face id is downloaded.
        """
        from hetero_ee.hub.config_file import read_spec
        from hetero_ee.hub.model_id import model_name
        from hetero_ee.models.known_shapes import known_spec

        if random_weights is not None:
            if self.named(model) not in (None, random_weights):
                raise UsageError("MODEL and --random-weights exclude each other; give one.")
            return self._requested(known_spec(random_weights), None), f"{random_weights} (random weights)", None
        folder = self.model_folder(model, progress, configuration_only=configuration_only)
        return self._requested(read_spec(folder), folder), model_name(folder), folder

    def _requested(self, spec: "ModelSpec", folder: Path | None) -> "ModelSpec":
        """Return the shapes with the activations and the sparse FFNs that the options request."""
        spec = replace(spec, activation_terms=ACTIVATION_TERMS[self.arguments()["activations"]])
        sparsity: str | None = self.given.get("sparsity")
        if sparsity is None:
            return spec
        with ending_at_once():
            from hetero_ee.sparsity.applied import planned_sparse
        from hetero_ee.config import cache_folder
        from hetero_ee.sparsity.request import SparsityRequest

        request = SparsityRequest.parsed(sparsity)
        assert request is not None, "something was asked"
        return planned_sparse(spec, folder, cache_folder(), self.arguments()["quantizer"], request)
