"""Keeps measured profiles, one file for each machine and each set of shapes; a foreign or damaged one is never used."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from hetero_ee.models.spec import ModelSpec
from hetero_ee.profiling.measure import product_shapes
from hetero_ee_profiles.hardware import MEASURED, HardwareProfile, Machine
from hetero_ee_profiles.records import read_record, write_record


def profile_file(folder: Path, machine: Machine, spec: ModelSpec, *, quick: bool) -> Path:
    """Where the profile of this machine for a model of these shapes lies, or would lie."""
    shapes = [asdict(shape) for shape in product_shapes(spec)]
    heads = spec.n_layers, spec.n_heads, spec.n_kv_heads, spec.head_dim
    identity = json.dumps([asdict(machine), shapes, heads], sort_keys=True)
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return folder / "profiles" / f"{key}-{'quick' if quick else 'full'}.json"


def kept_profile(
    folder: Path, machine: Machine, spec: ModelSpec, *, quick_will_do: bool
) -> tuple[HardwareProfile | None, str]:
    """The profile measured before, the full one first, and why there is none: a sentence, empty where nothing is wrong.

    A file that can't be read, is of another version or of another machine is left alone and not used.
    """
    problem = ""
    for quick in (False, True) if quick_will_do else (False,):
        file = profile_file(folder, machine, spec, quick=quick)
        if not file.exists():
            continue
        try:
            found = read_record(HardwareProfile, file)
        except (OSError, ValueError) as error:
            problem = f"the profile {file} can't be used ({error})"
            continue
        if found.kind == MEASURED and found.machine == machine:
            return found, ""
        problem = f"the profile {file} is of another machine or version"
    return None, problem


def keep_profile(folder: Path, profile: HardwareProfile, spec: ModelSpec, *, quick: bool) -> Path:
    """Writes the profile where kept_profile finds it; returns where. Raises OSError."""
    file = profile_file(folder, profile.machine, spec, quick=quick)
    write_record(profile, file)
    return file
