"""The profiles that ship with the package: derived from data sheets, for planning on paper."""

from importlib import resources

from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.records import from_json

FOLDER = "reference_profiles"


def reference_names() -> list[str]:
    """Names that `--hardware` takes besides files."""
    files = resources.files("hetero_ee_profiles").joinpath(FOLDER).iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def reference_profile(name: str) -> HardwareProfile:
    """The shipped profile of that name. Raises KeyError."""
    if name not in reference_names():
        raise KeyError(name)
    text = resources.files("hetero_ee_profiles").joinpath(FOLDER, f"{name}.json").read_text(encoding="utf-8")
    return from_json(HardwareProfile, text)
