"""`hetero-ee convert`: a checkpoint in, a store out, before the first generation."""

from pathlib import Path
from typing import Annotated

import typer

from hetero_ee_cli.options.engine import EngineOptions
from hetero_ee_cli.options.flags import with_options
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once


@with_options(without=["ctx_size"])
def convert(
    engine: EngineOptions,
    model: Annotated[str, typer.Argument(help="Hugging Face id, or folder with such a checkpoint.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="New folder for the converted model. [default: the cache]")
    ] = None,
) -> None:
    """Convert a model to 4-bit weights, and print where it is kept. If interrupted, run it again: it resumes."""
    options = engine.arguments(model)
    with ending_at_once():
        import torch

        from hetero_ee.weights.store.library import make_store
    from hetero_ee.config import cache_folder
    from hetero_ee.hub.resolve import resolve_model
    from hetero_ee_profiles.host.process import physical_core_count

    torch.set_num_threads(1)
    with stage_progress() as progress:
        folder = resolve_model(model, revision=engine.revision, offline=options["offline"], progress=progress)
        store = make_store(
            folder,
            cache=cache_folder(),
            output=output,
            quantizer=options["quantizer"],
            threads=options["threads"] or physical_core_count(),
            progress=progress,
        )
    print(store)
