"""`hetero-ee convert`: a checkpoint in, a store out, ahead of the first generation."""

from pathlib import Path
from typing import Annotated

import typer

from hetero_ee_cli.options.engine import Revision, engine_options
from hetero_ee_cli.options.settings import Offline, Quantizer, Threads
from hetero_ee_cli.terminal.signals import ending_at_once


def convert(
    model: Annotated[str, typer.Argument(help="Hugging Face id, or folder with such a checkpoint.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="New folder for the store. [default: the cache]")
    ] = None,
    revision: Revision = None,
    offline: Offline = None,
    quantizer: Quantizer = None,
    threads: Threads = None,
) -> None:
    """Convert a model to a store with 4-bit weights, and print where it lies. Run again, it goes on after a stop."""
    options = engine_options(
        model=model, revision=revision, offline=offline, quantizer=quantizer, ctx_size=None, threads=threads
    )
    with ending_at_once():
        import torch

        from hetero_ee.weights.store.library import make_store
    from hetero_ee.config import cache_folder
    from hetero_ee.hub.resolve import resolve_model
    from hetero_ee_cli.terminal.progress import stage_progress
    from hetero_ee_profiles.host.process import physical_core_count

    torch.set_num_threads(1)
    with stage_progress() as progress:
        folder = resolve_model(model, revision=revision, offline=options["offline"], progress=progress)
        store = make_store(
            folder,
            cache=cache_folder(),
            output=output,
            quantizer=options["quantizer"],
            threads=options["threads"] or physical_core_count(),
            progress=progress,
        )
    print(store)
