"""The flags of settings, for every command that has them: names and help come from the table of settings."""

from typing import Annotated, Any

import typer

from hetero_ee.config.settings import SETTING_OF


def _option(name: str, *short: str) -> Any:
    """A flag that is None where it isn't given, so that the environment and the file can speak."""
    setting = SETTING_OF[name]
    return typer.Option(*short, setting.flag, help=setting.help)


Model = Annotated[str | None, _option("model", "-m")]
Threads = Annotated[int | None, _option("threads", "-t")]
CtxSize = Annotated[int | None, _option("ctx_size", "-c")]
Quantizer = Annotated[str | None, _option("quantizer")]
Offline = Annotated[bool | None, _option("offline")]
