"""Finds the hardware profile to plan for by its name or file."""

import re
from pathlib import Path

from hetero_ee.errors import UsageError
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.records import read_record
from hetero_ee_profiles.reference import reference_names, reference_profile


def hardware_from(name: str | Path) -> HardwareProfile:
    """Return the shipped profile called `name`, or read the file `name`. Raises: UsageError: if neither works."""
    if isinstance(name, str) and (name in reference_names() or not re.search(r"[./\\]", name)):
        return reference_profile(name)
    try:
        return read_record(HardwareProfile, Path(name).expanduser())
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~name of a user who doesn't exist
        raise UsageError(f"the profile {name} can't be used ({error}); measure one with hetero-ee profile.") from error
