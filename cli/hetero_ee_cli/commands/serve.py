"""`hetero-ee serve`: serves models over HTTP to clients of OpenAI, Anthropic, llama-server and ollama."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hetero_ee.config import READING, Progress
from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.hub.model_folders import models_in
from hetero_ee.hub.model_id import local_folder
from hetero_ee.options.engine import MODEL, NO_HEAD
from hetero_ee.options.option import Option
from hetero_ee.serving.settings import SERVER_OPTIONS, ServerSettings
from hetero_ee_cli.commands.chat import ChatOptions
from hetero_ee_cli.options.engine import MODEL_FLAG, ModelArgument, ModelOptions
from hetero_ee_cli.options.flags import OptionGroup, model_names, with_options
from hetero_ee_cli.options.placement import LimitOptions, PlacementOptions, open_engine
from hetero_ee_cli.options.sampling import SamplingOptions
from hetero_ee_cli.terminal.output import say, say_loading
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once
from hetero_ee_cli.terminal.text_file import read_text

if TYPE_CHECKING:
    from hetero_ee.serving.metrics import MetricFamilies
    from hetero_ee.serving.served_model import ServedModel

KEY_FILE = Option(
    name="api_key_file",
    help="Read the key from a file, out of sight of this machine's other users.",
    typed=Path,
    flags=("--api-key-file",),
)
MODELS = replace(
    MODEL,
    name="models",
    help=f"{MODEL.help} Can be given more than once: requests then load the model that they name.",
    typed=list[str],
)
MODELS_FOLDER = Option(
    name="models_folder",
    help="Serve also the checkpoints, stores and GGUF files in this folder.",
    typed=Path,
    flags=("--models-dir",),
)
NO_LOG = Option(name="no_access_log", help="Do not print a line per request.", kind=bool, flags=("--no-access-log",))
EXTRA = ("prometheus_client", "starlette", "uvicorn")  # packages of the extra `server`


class ServerOptions(OptionGroup):
    """Options of the server. An option that is not given has the library's default."""

    PANEL: ClassVar = "Server"
    OPTIONS: ClassVar = {
        **{name: each for name, each in SERVER_OPTIONS.items() if each.flags},
        **{each.name: each for each in (KEY_FILE, MODELS, MODELS_FOLDER, NO_LOG)},
    }
    COMPLETIONS: ClassVar = {MODELS.name: model_names}

    def models(self, argument: str | None) -> dict[str, str | None]:
        """Return the models to serve.

        Returns:
            For each name that clients use, the folder, file or id; None for the demo model or the settings' model.

        Raises:
            UsageError: if two models have the same name, a path does not exist, or --alias is given for several.
        """
        folder: Path | None = self.given.get(MODELS_FOLDER.name)
        found = [str(each) for each in models_in(folder)] if folder is not None else []
        named = dict.fromkeys([*([argument] if argument else []), *self.given.get(MODELS.name, ()), *found])
        if len(named) < 2:
            return {self.given.get("model_name", ""): next(iter(named), None)}
        if "model_name" in self.given:
            raise UsageError(f"--alias names one model, and {len(named)} are served; drop --alias.")
        models: dict[str, str | None] = {}
        for each in named:
            local_folder(each)  # a wrong path is an error now, not in a client's request
            name = Path(each).name
            if name in models:
                raise UsageError(f"two models are called {name}, {models[name]} and {each}; rename one of the folders.")
            models[name] = each
        return models

    def settings(self, model_name: str, page_temperature: float | None) -> ServerSettings:
        given: dict[str, Any] = {name: value for name, value in self.given.items() if name in SERVER_OPTIONS}
        file = self.given.get(KEY_FILE.name)
        if file is not None:
            if "api_key" in given:
                raise UsageError("give one key: with --api-key, or with --api-key-file.")
            given["api_key"] = read_text("API key", file).strip()
        origins = tuple(given.get("cors_origins", ()))
        more = {"model_name": model_name, "cors_origins": origins, "page_temperature": page_temperature}
        return ServerSettings(**given | more)


@with_options(
    without={
        MODEL_FLAG: "its own --model can be given several times",
        "system": "requests bring their own",
        "seed": "each request has its own, or a random one",
        **dict.fromkeys(("json_schema", "json_schema_file", "grammar", "grammar_file"), "requests bring their own"),
        "stats": "it describes one text, and a server generates several at a time",
        "trace": "the trace of a server would grow without end",
        "verbose": "every answer has its `timings`, and /metrics has all",
    }
)
def serve(
    engine: ModelOptions,
    server: ServerOptions,
    conversation: ChatOptions,
    sampling: SamplingOptions,
    limits: LimitOptions,
    placement: PlacementOptions,
    model: ModelArgument = None,
) -> None:
    """Serve models over an HTTP API for clients of OpenAI, Anthropic, llama-server and ollama. Ctrl-C ends it.

    The text options are defaults for requests that do not set them. Needs the extra `server`. A single model is loaded
    at start. With several models, each is loaded by the first request that names it; --models-max stay loaded.
    """
    _require_extra()
    models = server.models(model)
    options, is_single = engine.arguments(next(iter(models.values()))), len(models) == 1
    names = [next(iter(models)) or Path(options["model"] or "demo").name] if is_single else list(models)
    if is_single:
        say_loading(options["model"])
    changes, template = sampling.changes(), conversation.template()
    settings, placed = server.settings(names[0], changes.get("temperature")), placement.checked(limits, engine)
    drafts = {placed.options.draft_head, placed.options.draft_model} - {None, NO_HEAD}
    if not is_single and (placed.plan is not None or drafts):
        raise UsageError(f"{placed.asking} belongs to one model, and {len(models)} are served; drop {placed.asking}.")
    with ending_at_once():
        from hetero_ee.serving import server as http
        from hetero_ee.serving.models import Models
        from hetero_ee.serving.served_model import ServedModel

    def opened(name: str, families: "MetricFamilies | None" = None) -> "ServedModel":
        chosen = options | {"n_sequences": settings.n_sequences}
        chosen |= {} if is_single else {"model": models[name]}
        with stage_progress() as progress:
            engine = open_engine(chosen, placed, _without_prompts(progress))
        try:
            usual = engine.default_sampling.changed(**changes)
            return ServedModel(engine, replace(settings, model_name=name), usual, template, families)
        except BaseException:
            engine.close()
            raise

    with http.bind(settings) as listening:
        offered = Models.single(opened(names[0])) if is_single else Models(settings, names, opened)
        said = f"{names[0]} is" if is_single else f"{len(names)} models are"
        line = f"{said} served at {http.url_of(settings, listening)}; "
        line += f"chat page: {http.page_of(settings, listening)}; Ctrl-C ends it."
        http.serve(offered, listening, lambda: say(line), None if server.given.get(NO_LOG.name) else say)


def _without_prompts(progress: Progress) -> Progress:
    """Return a progress function that ignores the reading of prompts, which a server's terminal should not show."""

    def tell(stage: str, n_done: int, n_all: int) -> None:
        if stage != READING:
            progress(stage, n_done, n_all)

    return tell


def _require_extra() -> None:
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise HeteroError(f"serve needs {missing[0]}, which is not installed; pip install 'hetero-ee[server]'.")
