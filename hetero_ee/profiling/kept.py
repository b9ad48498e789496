"""Profiles on disk: one file for each machine, set of shapes and preset. Foreign or damaged files are not used.

A profile whose measurement other programs disturbed is first stored under another name. If the next measurement is
disturbed too, the better of the two is used, since a busy machine yields no better one. It stays provisional:
forget_provisional removes it after a text that was much faster than it predicts.
"""

import hashlib
import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from hetero_ee.models.spec import ModelSpec
from hetero_ee.profiling.disturbance import disturbance
from hetero_ee.profiling.preset import product_shapes
from hetero_ee.weights.store.filesystem import UNFINISHED_SUFFIX, FileSystem, remove_if_there, replace_file
from hetero_ee_profiles.hardware import MEASURED, HardwareProfile, Machine
from hetero_ee_profiles.records import read_record, to_json

FOLDER = "profiles"
DISTURBED_SUFFIX = ".disturbed"


def profile_file(folder: Path, machine: Machine, spec: ModelSpec, *, quick: bool) -> Path:
    """Return the path for a machine's profile at the shapes of this model."""
    shapes = [asdict(shape) for shape in product_shapes(spec)]
    heads = spec.n_layers, spec.n_heads, spec.n_kv_heads, spec.head_dim
    identity = json.dumps([asdict(machine), shapes, heads], sort_keys=True)
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return folder / FOLDER / f"{key}-{'quick' if quick else 'full'}.json"


def kept_profile(
    folder: Path, machine: Machine, spec: ModelSpec, *, quick_will_do: bool
) -> tuple[HardwareProfile | None, str]:
    """Return the kept profile, preferably a full one, and a problem with its file ("" if there isn't one).

    Files that can't be read, or that are of another version or machine, are neither used nor removed.
    """
    problem = ""
    for quick in (False, True) if quick_will_do else (False,):
        file = profile_file(folder, machine, spec, quick=quick)
        try:
            if file.exists():
                return _read(file, machine), ""
        except (OSError, ValueError) as error:
            problem = f"the profile {file} {error}"
    return None, problem


def kept_file(folder: Path, profile: HardwareProfile, spec: ModelSpec) -> Path | None:
    """Return the path of the file that holds this profile, None if it is not kept. Free memory is not compared."""
    for quick in (False, True):
        file = profile_file(folder, profile.machine, spec, quick=quick)
        with suppress(OSError, ValueError):
            if _read(file, profile.machine).cpu[0].matmuls == profile.cpu[0].matmuls:
                return file
    return None


def keep_profile(folder: Path, profile: HardwareProfile, spec: ModelSpec, *, quick: bool) -> Path:
    """Write the profile where kept_profile looks for it, and return the path. Raises: OSError: if that fails."""
    file = profile_file(folder, profile.machine, spec, quick=quick)
    _write(profile, file)
    with suppress(OSError):
        remove_if_there(_disturbed_file(file), FileSystem())
    return file


def keep_unless_disturbed(
    folder: Path, profile: HardwareProfile, spec: ModelSpec, *, quick: bool
) -> tuple[HardwareProfile, bool]:
    """Keep the profile, or the less disturbed of this and an earlier one; not if it is the first disturbed one.

    Returns:
        The profile to use now, and whether it was kept.

    Raises:
        OSError: if it can't be written.
    """
    disturbed = _disturbed_file(profile_file(folder, profile.machine, spec, quick=quick))
    if profile.doubts and not disturbed.exists():
        _write(profile, disturbed)
        return profile, False
    if profile.doubts:
        with suppress(OSError, ValueError):
            former = _read(disturbed, profile.machine)
            if {times.threads for times in former.cpu} >= {times.threads for times in profile.cpu}:
                profile = min(profile, former, key=disturbance)
    keep_profile(folder, profile, spec, quick=quick)
    return profile, True


def best_read_rates(folder: Path, machine: Machine) -> dict[int, float]:
    """Return the highest memory read rate, in bytes/s, of all profiles kept for this processor, by thread count."""
    best: dict[int, float] = {}
    for file in (folder / FOLDER).glob("*.json"):
        with suppress(OSError, ValueError):
            found = read_record(HardwareProfile, file)
            if (found.machine.cpu_model, found.machine.n_cores) == (machine.cpu_model, machine.n_cores):
                for times in found.cpu:
                    best[times.threads] = max(best.get(times.threads, 0.0), times.read_bytes_per_s.value)
    return best


def forget_provisional(folder: Path, profile: HardwareProfile, spec: ModelSpec) -> bool:
    """Remove the file of a provisional profile, so that the next run measures again. Return whether there was one."""
    file = kept_file(folder, profile, spec) if profile.doubts else None
    if file is None:
        return False
    try:
        FileSystem().remove_file(file)
    except OSError:  # the next run still finds the profile
        return False
    return True


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished files of killed processes. The caller must hold the measuring lock. Raises: OSError."""
    for file in (folder / FOLDER).glob(f"*{UNFINISHED_SUFFIX}"):
        FileSystem().remove_file(file)


def _write(profile: HardwareProfile, file: Path) -> None:
    """Write the file via a uniquely named temporary one, since other processes may write too if locks don't work."""
    mark = f".{os.getpid()}-{secrets.token_hex(4)}"
    replace_file(file, to_json(profile).encode(), FileSystem(), mark)


def _disturbed_file(file: Path) -> Path:
    return file.with_suffix(DISTURBED_SUFFIX)


def _read(file: Path, machine: Machine) -> HardwareProfile:
    """Return the profile in `file`. Raises: ValueError: continues a sentence that begins with the file's name."""
    try:
        found = read_record(HardwareProfile, file)
    except (OSError, ValueError) as error:
        raise ValueError(f"can't be used ({error})") from error
    if found.kind != MEASURED or found.machine != machine:
        raise ValueError("is of another machine or version")
    return found
