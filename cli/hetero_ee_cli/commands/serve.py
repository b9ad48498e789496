"""`hetero-ee serve`: serves a model over HTTP to OpenAI's and Anthropic's clients."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from hetero_ee.config import READING, Progress
from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.options.option import Option
from hetero_ee.serving.settings import SERVER_OPTIONS, ServerSettings
from hetero_ee_cli.commands.chat import ChatOptions
from hetero_ee_cli.options.engine import ModelArgument, ModelOptions
from hetero_ee_cli.options.flags import OptionGroup, with_options
from hetero_ee_cli.options.placement import LimitOptions, PlacementOptions, open_engine
from hetero_ee_cli.options.sampling import SamplingOptions
from hetero_ee_cli.terminal.output import say
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once
from hetero_ee_cli.terminal.text_file import read_text

KEY_FILE = Option(
    name="api_key_file",
    help="Read the key from a file, out of sight of this machine's other users.",
    typed=Path,
    flags=("--api-key-file",),
)
EXTRA = ("prometheus_client", "starlette", "uvicorn")  # packages of the extra `server`


class ServerOptions(OptionGroup):
    """Options of the server. An option that is not given has the library's default."""

    PANEL: ClassVar = "Server"
    OPTIONS: ClassVar = {name: each for name, each in SERVER_OPTIONS.items() if each.flags} | {"api_key_file": KEY_FILE}

    def settings(self, model: str | None) -> ServerSettings:
        given: dict[str, Any] = {"model_name": Path(model or "demo").name} | self.given
        file = given.pop(KEY_FILE.name, None)
        if file is not None:
            if "api_key" in given:
                raise UsageError("give one key: with --api-key, or with --api-key-file.")
            given["api_key"] = read_text("API key", file).strip()
        return ServerSettings(**given | {"cors_origins": tuple(given.get("cors_origins", ()))})


@with_options(
    without={
        "system": "requests bring their own",
        "seed": "each request has its own, or a random one",
        "stats": "of several texts at a time it would say nothing of one",
        "trace": "a server's would have no end",
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
    """Serve a model by HTTP, for clients of OpenAI's and Anthropic's. Ctrl-C ends it.

    The options of the text hold for requests that say nothing. Needs the extra `server`.
    """
    _require_extra()
    options = engine.arguments(model)
    settings, template = server.settings(options["model"]), conversation.template()
    placed, changes = placement.checked(limits, engine), sampling.changes()
    with ending_at_once():
        from hetero_ee.serving import server as http
        from hetero_ee.serving.served_model import ServedModel
    with http.bind(settings) as listening:
        with stage_progress() as progress:
            opened = open_engine(options, placed, _without_prompts(progress))
        with opened:
            served = ServedModel(opened, settings, opened.default_sampling.changed(**changes), template)
            line = f"{settings.model_name} is served at {http.url_of(settings, listening)}; Ctrl-C ends it."
            http.serve(served, listening, lambda: say(line))


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
