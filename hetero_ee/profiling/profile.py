"""HardwareProfile of the Python interface: the record of hetero_ee_profiles with three ways to get one.

It is a separate class because measuring needs the engine, which hetero_ee_profiles cannot import.
"""

from dataclasses import fields
from pathlib import Path
from typing import Self

from hetero_ee.config import Progress, cache_folder
from hetero_ee.errors import UsageError, shown
from hetero_ee.hub.config_file import read_spec
from hetero_ee.options.engine import MODEL_OPTIONS
from hetero_ee.planning.hardware import hardware_from
from hetero_ee.weights.store.library import model_folder
from hetero_ee_profiles import hardware
from hetero_ee_profiles.reference import reference_profile


class HardwareProfile(hardware.HardwareProfile):
    """Speeds of a machine: measured on this one, read from a file, or shipped with the package."""

    __slots__ = ()

    @classmethod
    def measure(
        cls,
        model: str | Path | None = None,
        *,
        quick: bool = True,
        refresh: bool = False,
        threads: int = 0,
        offline: bool = False,
        progress: Progress | None = None,
    ) -> Self:
        """Return this machine's profile at the model's shapes, kept or measured now. Limits torch to one thread.

        Args:
            model: as in Engine.from_pretrained. For an id, only the configuration is downloaded.
            quick: measure for about 5 seconds instead of up to 3 minutes.
            refresh: measure again even if a profile is kept.
            threads: a thread count to measure in addition to all cores; 0 for none.
            progress: called with (stage, done, total). If total is 0, `stage` is a remark for the user instead.

        Raises:
            UsageError, ModelError, StoreError, DiskFullError: if an argument, the model or the disk can't be used.
        """
        for name, value in (("quick", quick), ("refresh", refresh), ("offline", offline)):
            if not isinstance(value, bool):
                raise UsageError(f"{name} is {shown(value)}; expected True or False.")
        MODEL_OPTIONS["threads"].check(threads)
        if progress is not None and not callable(progress):
            raise UsageError(f"progress is {shown(progress)}; expected a function (stage, done, total).")
        folder = model_folder(model, cache_folder(), offline=offline, progress=progress, configuration_only=True)
        import torch

        from hetero_ee.profiling.automatic import profile_here
        from hetero_ee.profiling.machine_profile import Wanted

        torch.set_num_threads(1)  # more would compete with the kernels' threads
        wanted = Wanted(quick, refresh, (threads,) if threads else (), "HardwareProfile.measure")
        return cls._of(profile_here(read_spec(folder), folder, wanted, progress))

    @classmethod
    def load(cls, file: str | Path) -> Self:
        """Read a profile from a JSON file, as printed by `hetero-ee profile --json`. Raises: UsageError."""
        if not isinstance(file, str | Path) or not str(file):
            raise UsageError(f"the profile {shown(file)} is not a file; give the path of one.")
        return cls._of(hardware_from(Path(file)))

    @classmethod
    def shipped(cls, name: str) -> Self:
        """Return the shipped profile of this name, derived from data sheets. Raises: UsageError: lists the names."""
        return cls._of(reference_profile(name))

    @classmethod
    def _of(cls, record: hardware.HardwareProfile) -> Self:
        return cls(**{field.name: getattr(record, field.name) for field in fields(record)})
