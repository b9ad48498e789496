"""`hetero-ee models`: the stores in the cache folder, listed, verified and removed."""

import json
import os
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_ee_cli.options.common import Json
from hetero_ee_cli.terminal.output import printable, say
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.weights.store.library import StoredModel
    from hetero_ee.weights.store.verification import Finding

JSON_SCHEMA = 1
EXIT_FOUND = 1


def models(context: typer.Context, as_json: Json = False) -> None:
    """Models that were converted: list, verify and remove them. Without a command, lists them."""
    from hetero_ee.errors import UsageError

    if context.invoked_subcommand is None:
        list_models(as_json)
    elif as_json:
        raise UsageError(f"give --json after {context.invoked_subcommand}.")


def list_models(as_json: Json = False) -> None:
    """List the stores in the cache folder, with what a look at their manifests says."""
    cache = _cache()
    with ending_at_once():
        from hetero_ee.weights.store.library import STORES_FOLDER, stored_models
    found = stored_models(cache)
    n_bytes = sum(model.n_bytes for model in found)
    if as_json:
        folder = str(cache / STORES_FOLDER)
        print(json.dumps({"schema": JSON_SCHEMA, "folder": folder, "stores": list(map(_plain, found))}))
        return
    if found:
        print(_table(found))
    count = f"{len(found)} store{'' if len(found) == 1 else 's'}"
    say(f"{count}, {_size(n_bytes)}, in {printable(str(cache / STORES_FOLDER))}")


def remove(
    names: Annotated[list[str], typer.Argument(help="Names as in the list, or beginnings that fit only one.")],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Don't ask.")] = False,
) -> None:
    """Remove stores and their calibrations from the cache folder. They can be made again, from the checkpoints."""
    from hetero_ee.errors import UsageError

    cache = _cache()
    with ending_at_once():
        from hetero_ee.weights.store.library import remove_stored, stored_model
    chosen = {model.name: model for model in (stored_model(cache, name) for name in names)}
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("nobody is there to be asked; give --yes to remove all the same.")
        if not _agrees(list(chosen.values())):
            say("nothing is removed.")
            return
    for model in chosen.values():
        remove_stored(model, cache)
        print(printable(model.name))


def verify(
    stores: Annotated[
        list[str] | None, typer.Argument(help="Names as in the list, or folders. [default: all in the cache]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read every byte of stores and compare it with their checksums. Exit code 1 if anything is not as written."""
    with ending_at_once():
        from hetero_ee.weights.store import verification
    from hetero_ee_cli.terminal.progress import stage_progress

    results: list[tuple[Path, tuple[Finding, ...]]] = []
    for folder in _folders(stores or []):
        label = printable(folder.name)
        with stage_progress(of_each_time=True) as progress:
            found = verification.verify(folder, progress)
        results.append((folder, found))
        if not as_json:
            for line in [str(finding) for finding in found] or ["whole"]:
                print(f"{label}: {printable(line)}", flush=True)
    if as_json:
        stored = [{"path": str(path), "findings": list(map(asdict, found))} for path, found in results]
        print(json.dumps({"schema": JSON_SCHEMA, "stores": stored}))
    if any(found for _, found in results):
        sys.exit(EXIT_FOUND)


def _cache() -> Path:
    from hetero_ee.config import cache_folder

    return cache_folder()


def _folders(stores: list[str]) -> list[Path]:
    """The folders that are meant; without any, those of all finished stores."""
    from hetero_ee.config.toml_file import expanded
    from hetero_ee.weights.store.library import StoreState, stored_model, stored_models

    cache = _cache()
    if not stores:
        return [model.path for model in stored_models(cache) if model.state is not StoreState.UNFINISHED]
    is_path = [os.sep in store or store in (".", "..") or store.startswith("~") for store in stores]
    return [
        expanded(store, "the store") if path else stored_model(cache, store).path
        for store, path in zip(stores, is_path, strict=True)
    ]


def _agrees(chosen: "list[StoredModel]") -> bool:
    for model in chosen:
        and_more = ", with its calibration" if model.has_calibration else ""
        say(f"{printable(model.name)}, {_size(model.n_bytes)}{and_more}")
    print("Remove? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _plain(model: "StoredModel") -> dict[str, Any]:
    return asdict(model) | {"path": str(model.path), "state": model.state.value}


def _table(found: "list[StoredModel]") -> str:
    rows = [("name", "state", "quantizer", "calibration", "size", "last used")]
    for model in found:
        day = datetime.fromtimestamp(model.last_used_s).strftime("%Y-%m-%d")
        calibration = "beside it" if model.has_calibration else "-"
        told = printable(model.name), model.state.value, printable(model.quantizer or "")
        rows.append((*told, calibration, _size(model.n_bytes), day))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**29 else f"{n_bytes / 2**20:.1f} MiB"
