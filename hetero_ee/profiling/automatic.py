"""Finds the profile that a model is planned with by default: this machine's, kept on disk or measured now."""

import time
from dataclasses import replace
from pathlib import Path

from hetero_ee.config import Progress, cache_folder, data_folder
from hetero_ee.errors import HeteroError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.profiling.machine_profile import Wanted, known_profile, machine_profile
from hetero_ee.profiling.problems import reason
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.host.process import capped_threads, usable_threads

COMMAND = "Engine.from_pretrained"  # for the profile's record


def automatic_profile(
    spec: ModelSpec, folder: Path, threads: int, progress: Progress | None, *, measures: bool
) -> HardwareProfile | None:
    """Return this machine's kept profile, None if there isn't one.

    Args:
        measures: measure a quick profile if none is kept.

    Raises:
        HeteroError: if measuring fails.
    """
    known = known_profile(spec, threads, data_folder=data_folder(), cache_folder=cache_folder())
    if known is not None or not measures:
        return known
    try:
        return profile_here(spec, folder, Wanted(True, False, (threads,), COMMAND), progress)
    except HeteroError:
        raise
    except Exception as error:  # drivers, compilers and disks raise errors of every kind
        raise HeteroError(f"this machine can't be measured ({reason(error)}).") from error


def profile_here(spec: ModelSpec, folder: Path | None, wanted: Wanted, progress: Progress | None) -> HardwareProfile:
    """Call machine_profile with the user's folders, and time the disk by the largest weight file in `folder`."""
    if progress is not None and (problem := capped_threads(max(wanted.threads, default=0))):
        progress(problem, 0, 0)
    wanted = replace(wanted, threads=tuple(map(usable_threads, wanted.threads)))
    found = [] if folder is None else [*folder.glob("*.safetensors"), *folder.glob("weights.bin")]
    files = [file for file in found if file.is_file()]  # not a dangling link
    return machine_profile(
        spec,
        wanted,
        data_folder=data_folder(),
        cache_folder=cache_folder(),
        disk_file=max(files, key=lambda file: file.stat().st_size, default=None),
        clock=time.perf_counter,
        progress=progress,
    )
