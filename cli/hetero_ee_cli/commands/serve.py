"""`hetero-ee serve`: a model behind HTTP, as OpenAI's and Anthropic's clients ask for one."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from hetero_ee.config import READING, Progress
from hetero_ee.errors import HeteroError, UsageError
from hetero_ee_cli.commands.chat import ChatOptions
from hetero_ee_cli.options.engine import ModelArgument, ModelOptions
from hetero_ee_cli.options.flags import with_options
from hetero_ee_cli.options.placement import PlacementOptions, open_engine
from hetero_ee_cli.options.planning import LimitOptions
from hetero_ee_cli.options.sampling import SamplingOptions
from hetero_ee_cli.terminal.output import say
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once
from hetero_ee_cli.terminal.text_file import read_text

if TYPE_CHECKING:
    from hetero_ee.serving.settings import ServerSettings

EXTRA = ("prometheus_client", "starlette", "uvicorn")  # packages of the extra `server`


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The fields of ServerSettings that have an option; None keeps the default there."""

    PANEL: ClassVar[str] = "Server"

    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one. [default: 8080]")] = None
    api_key: Annotated[str | None, typer.Option(help="Key that requests have to bring.")] = None
    api_key_file: Annotated[
        Path | None, typer.Option(help="Read the key from a file, out of sight of this machine's other users.")
    ] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen on an address that others reach, without a key.")
    ] = False
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Let pages of this origin ask, such as http://localhost:3000; can be given more than once."),
    ] = None
    n_slots: Annotated[int | None, typer.Option("-np", "--parallel", help="Texts at a time. [default: 4]")] = None
    queue_size: Annotated[
        int | None, typer.Option("--queue", help="Requests that may wait beside them. [default: 64]")
    ] = None
    request_timeout_s: Annotated[
        float | None, typer.Option("--timeout", help="Seconds that an answer may take. [default: 600]")
    ] = None
    model_name: Annotated[
        str | None, typer.Option("--alias", help="The model's name for clients. [default: its own]")
    ] = None

    def settings(self, model: str | None) -> "ServerSettings":
        """Raises UsageError."""
        from hetero_ee.serving.settings import ServerSettings

        key = self.api_key
        if self.api_key_file is not None:
            if key is not None:
                raise UsageError("give one key: with --api-key, or with --api-key-file.")
            key = read_text("API key", self.api_key_file).strip()
        given: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "api_key": key,
            "cors_origins": tuple(self.cors_origin or ()),
            "n_slots": self.n_slots,
            "queue_size": self.queue_size,
            "request_timeout_s": self.request_timeout_s,
            "model_name": self.model_name or Path(model or "demo").name,
            "insecure": self.insecure,
        }
        return ServerSettings(**{name: value for name, value in given.items() if value is not None})


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
    """The same for everything but the prompts of requests, whose progress is nobody's here."""

    def tell(stage: str, n_done: int, n_all: int) -> None:
        if stage != READING:
            progress(stage, n_done, n_all)

    return tell


def _require_extra() -> None:
    """Raises HeteroError where a package is missing."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise HeteroError(f"serve needs {missing[0]}, which is not installed; pip install 'hetero-ee[server]'.")
