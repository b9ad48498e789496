"""`hetero-ee doctor`: reports what this machine offers to the engine, and what is missing."""

import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_ee.config import cache_folder
from hetero_ee.config.settings import Settings, read_settings
from hetero_ee.errors import UsageError
from hetero_ee_cli.options.flags import Json
from hetero_ee_cli.terminal.output import print_document
from hetero_ee_cli.terminal.streams import styled

if TYPE_CHECKING:
    from hetero_ee_cli.checks.finding import Check, Row
    from hetero_ee_profiles.host.host import Host

COLOURS = {"ok": "32", "warn": "33", "fail": "31"}


def doctor(as_json: Json = False) -> None:
    """Check this machine and its software. Exit code 1 if a check fails.

    The output has no user name, host name or token in it, so it can be shared.
    """
    from hetero_ee_cli.checks.finding import Status, examine
    from hetero_ee_profiles.host.host import this_host

    rows = examine(checks(this_host(), os.environ))
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    if as_json:
        print_document({"rows": [dataclasses.asdict(row) for row in rows]})
    else:
        shown = lines(rows, in_colour=is_terminal() and not os.environ.get("NO_COLOR"))
        print("\n".join(shown), file=styled(sys.stdout))
    if any(row.status is Status.FAIL for row in rows):
        sys.exit(1)


def is_terminal() -> bool:
    return sys.stdout.isatty()


def checks(host: "Host", environment: Mapping[str, str]) -> "dict[str, Check]":
    """Return all checks by name, in the order of the output."""
    import hetero_ee
    from hetero_ee_cli.checks import configuration, machine, software, storage
    from hetero_ee_cli.checks.finding import once
    from hetero_ee_profiles.gpu.inventory import gpu_inventory
    from hetero_ee_profiles.host.torch_build import torch_build

    settings, problem = _settings(environment)
    folder = _cache_folder(settings)
    build = once(partial(torch_build, host))
    return {
        "hetero_ee": software.hetero_ee_version,
        "Python": software.python,
        "system": partial(machine.operating_system, host),
        "CPU": partial(machine.processor, host),
        "instructions": partial(machine.instructions, host, environment),
        "memory": partial(machine.memory, host),
        "huge pages": partial(machine.huge_pages, host),
        "torch": partial(software.torch, build),
        "GPU": partial(machine.gpu, host, build),
        "GPU matmul": partial(software.gpu_matmul, lambda: gpu_inventory(host).kind),
        "transformers": partial(software.needed, "transformers"),
        "huggingface_hub": partial(software.needed, "huggingface_hub"),
        "Numba": software.numba,
        "OpenMP": partial(software.openmp, host),
        "versions": software.untested_versions,
        "cache disk": partial(storage.cache_disk, host, folder),
        "kernel cache": partial(storage.kernel_cache, folder),
        "stores": partial(storage.stores, folder),
        "configuration": partial(configuration.configuration, settings, problem),
        "variables": partial(configuration.variables, settings),
        "Hugging Face": partial(configuration.hugging_face, settings),
        "clock": partial(machine.clock, time.time(), Path(hetero_ee.__file__)),
    }


def lines(rows: "list[Row]", in_colour: bool) -> list[str]:
    """Return one line per row, followed by a line with its advice if there is any."""
    width = max(len(row.name) for row in rows)
    shown = []
    for row in rows:
        status = f"{row.status.value:4}"
        if in_colour:
            status = f"\x1b[{COLOURS[row.status]}m{status}\x1b[0m"
        shown.append(f"{status}  {row.name:{width}}  {row.finding}")
        if row.advice:
            shown.append(f"{'':4}  {'':{width}}  -> {row.advice}")
    return shown


def _settings(environment: Mapping[str, str]) -> tuple[Settings, UsageError | None]:
    """Return the settings and None. If the file can't be used, return the settings without it and the error."""
    try:
        return read_settings(environment), None
    except UsageError as error:
        return Settings(Path(), {}, environment), error


def _cache_folder(settings: Settings) -> Path:
    """Return the cache folder, or the default one if the setting is invalid."""
    try:
        return cache_folder(settings)
    except UsageError:
        return cache_folder(Settings(settings.file))
