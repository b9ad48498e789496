"""`hetero-ee search`: finds models on the Hugging Face Hub that this engine can run."""

from dataclasses import asdict
from typing import Annotated

import typer

from hetero_ee.config.settings import read_settings
from hetero_ee.options.engine import MODEL_OPTIONS
from hetero_ee_cli.options.flags import Json
from hetero_ee_cli.terminal.output import print_document, printable, say, table
from hetero_ee_cli.terminal.signals import ending_at_once

INT4_BYTES = 4.5 / 8  # a weight, scales included
COLUMNS = ("model", "parameters", "in int4", "downloads", "terms")


def search(
    words: Annotated[list[str], typer.Argument(help="Words of the model's name.")],
    limit: Annotated[int, typer.Option(min=1, max=100, help="Models to list at most.")] = 20,
    offline: Annotated[bool | None, typer.Option("--offline", help=MODEL_OPTIONS["offline"].full_help)] = None,
    as_json: Json = False,
) -> None:
    """Search the Hugging Face Hub for models that can be run, the most downloaded first."""
    with ending_at_once():
        from hetero_ee.hub.search import search_models

    found = search_models(" ".join(words), limit, offline=read_settings().value("offline", offline))
    if as_json:
        print_document({"models": [asdict(model) for model in found]})
        return
    if found:
        rows: list[tuple[str, ...]] = [COLUMNS]
        for each in found:
            n, terms = each.n_parameters, "gated" if each.is_gated else "open"
            sizes = ("?", "?") if n is None else (f"{n / 1e9:.2f} B", f"{n * INT4_BYTES / 2**30:.1f} GiB")
            rows.append((printable(each.name), *sizes, f"{each.n_downloads:,}", terms))
        print(table(rows, numbers_from=1))
    say(f"{len(found)} model{'' if len(found) == 1 else 's'}; hetero-ee run MODEL runs one, pull only fetches it.")
