"""Flags and settings as the arguments of Engine.from_pretrained, for every command that opens a model."""

from typing import Annotated, Any

import typer

Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face id.")]


def engine_options(
    *,
    model: str | None,
    revision: str | None,
    offline: bool | None,
    quantizer: str | None,
    ctx_size: int | None,
    threads: int | None,
) -> dict[str, Any]:
    """The arguments by name; where a flag is None, the environment, the file or the default speaks."""
    from hetero_ee.config.settings import read_settings

    settings = read_settings()
    return {
        "model": settings.value("model", model),
        "revision": revision,
        "offline": settings.value("offline", offline),
        "quantizer": settings.value("quantizer", quantizer),
        "context_tokens": settings.value("ctx_size", ctx_size),
        "threads": settings.value("threads", threads),
    }
