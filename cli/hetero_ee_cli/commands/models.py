"""`hetero-ee models`: lists, verifies and removes the converted models in the cache folder."""

import os
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_ee.config import cache_folder
from hetero_ee.config.toml_file import expanded
from hetero_ee.errors import UsageError
from hetero_ee_cli.options.flags import Json, model_names
from hetero_ee_cli.terminal.output import print_document, printable, say, table
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.weights.store.library import StoredModel
    from hetero_ee.weights.store.verification import Finding

EXIT_FOUND = 1
COLUMNS = ("name", "state", "made from", "quantizer", "bits", "error", "calibration", "size", "last used")


def models(context: typer.Context, as_json: Json = False) -> None:
    """List, verify and remove converted models. Without a command, lists them."""
    if context.invoked_subcommand is None:
        list_models(as_json)
    elif as_json:
        raise UsageError(f"give --json after {context.invoked_subcommand}.")


def list_models(as_json: Json = False) -> None:
    """List the converted models in the cache folder."""
    cache = cache_folder()
    with ending_at_once():
        from hetero_ee.weights.store.library import stored_models
        from hetero_ee.weights.store.names import STORES_FOLDER
    found = stored_models(cache)
    n_bytes = sum(model.n_bytes for model in found)
    folder = str(cache / STORES_FOLDER)
    if as_json:
        stores = [asdict(model) | {"path": str(model.path), "state": model.state.value} for model in found]
        print_document({"folder": folder, "stores": stores})
        return
    if found:
        print(table([COLUMNS, *map(_row, found)]))
    say(f"{len(found)} store{'' if len(found) == 1 else 's'}, {_size(n_bytes)}, in {printable(folder)}")


def remove(
    names: Annotated[
        list[str], typer.Argument(help="Names as listed, or unambiguous prefixes of them.", autocompletion=model_names)
    ],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Remove without asking.")] = False,
) -> None:
    """Remove converted models and their calibrations from the cache folder. Checkpoints stay."""
    cache = cache_folder()
    with ending_at_once():
        from hetero_ee.weights.store.library import remove_stored, stored_model
    chosen = {model.name: model for model in (stored_model(cache, name) for name in names)}
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("standard input is not a terminal, so removal can't be confirmed; give --yes.")
        if not _agrees(list(chosen.values())):
            say("Nothing was removed.")
            return
    for model in chosen.values():
        remove_stored(model, cache)
        print(printable(model.name))


def verify(
    stores: Annotated[
        list[str] | None,
        typer.Argument(help="Names as listed, or folders. [default: all in the cache]", autocompletion=model_names),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare every byte of converted models with their checksums. Exit code 1 if anything differs."""
    with ending_at_once():
        from hetero_ee.weights.store import verification

    results: list[tuple[Path, tuple[Finding, ...]]] = []
    for folder in _folders(stores or []):
        label = printable(folder.name)
        with stage_progress(of_each_time=True) as progress:
            found = verification.verify(folder, progress)
        results.append((folder, found))
        if not as_json:
            for line in [str(finding) for finding in found] or ["intact"]:
                print(f"{label}: {printable(line)}", flush=True)
    if as_json:
        stored = [{"path": str(path), "findings": list(map(asdict, found))} for path, found in results]
        print_document({"stores": stored})
    if any(found for _, found in results):
        sys.exit(EXIT_FOUND)


def _folders(stores: list[str]) -> list[Path]:
    """Return the folders of these stores, or of all finished stores if `stores` is empty."""
    from hetero_ee.weights.store.library import StoreState, stored_model, stored_models

    cache = cache_folder()
    if not stores:
        return [model.path for model in stored_models(cache) if model.state is not StoreState.UNFINISHED]
    is_path = [os.sep in store or store in (".", "..") or store.startswith("~") for store in stores]
    return [
        expanded(store, "the store") if path else stored_model(cache, store).path
        for store, path in zip(stores, is_path, strict=True)
    ]


def _agrees(chosen: "list[StoredModel]") -> bool:
    for model in chosen:
        and_more = ", and its calibration" if model.has_calibration else ""
        say(f"{printable(model.name)}, {_size(model.n_bytes)}{and_more}")
    print("Remove? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _row(model: "StoredModel") -> tuple[str, ...]:
    calibration = "yes" if model.has_calibration else "-"
    day = datetime.fromtimestamp(model.last_used_s).strftime("%Y-%m-%d")
    made = printable(model.source_format or ""), printable(model.quantizer or "")
    bits = "" if model.bits is None else f"{model.bits:.1f}"
    error = "" if model.relative_squared_error is None else f"{model.relative_squared_error:.1g}"
    return (printable(model.name), model.state.value, *made, bits, error, calibration, _size(model.n_bytes), day)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**29 else f"{n_bytes / 2**20:.1f} MiB"
