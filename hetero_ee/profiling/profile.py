"""HardwareProfile as Python callers see it: the record of hetero_ee_profiles, and three ways to come by one.

A class of its own, since measuring needs the engine's kernels and executors, and imports go one way.
"""

from dataclasses import fields
from pathlib import Path
from typing import Self

from hetero_ee.config import Progress, cache_folder
from hetero_ee.errors import UsageError, shown
from hetero_ee.hub.config_file import read_spec
from hetero_ee.planning.hardware import hardware_from
from hetero_ee.planning.limits import MAX_THREADS, is_whole
from hetero_ee.weights.store.library import model_folder
from hetero_ee_profiles import hardware
from hetero_ee_profiles.reference import reference_profile


class HardwareProfile(hardware.HardwareProfile):
    """What a machine does in which time: measured here, read from a file, or shipped."""

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
        """This machine at the model's shapes: kept from before, or measured now and kept; sets torch to one thread.

        model: as Engine.from_pretrained takes it; of an id only the configuration is downloaded. quick: some 5 seconds,
            else up to 3 minutes. refresh: measured again even where one was kept. threads: a count that has to be
            measured besides all cores, 0 for none. progress: called with (stage, done, in all); with 0 in all, the
            stage is a remark.

        Raises UsageError, ModelError, StoreError or DiskFullError.
        """
        for name, value in (("quick", quick), ("refresh", refresh), ("offline", offline)):
            if not isinstance(value, bool):
                raise UsageError(f"{name} is {shown(value)}; expected True or False.")
        if not is_whole(threads, 0, MAX_THREADS):
            raise UsageError(f"threads is {shown(threads)}; expected a whole number from 0 (all) to {MAX_THREADS}.")
        if progress is not None and not callable(progress):
            raise UsageError(f"progress is {shown(progress)}; expected a function of (stage, done, in all).")
        folder = model_folder(model, cache_folder(), offline=offline, progress=progress, configuration_only=True)
        import torch

        from hetero_ee.profiling.automatic import profile_here
        from hetero_ee.profiling.machine_profile import Wanted

        torch.set_num_threads(1)  # more would compete with the kernels' threads
        wanted = Wanted(quick, refresh, (threads,) if threads else (), "HardwareProfile.measure")
        return cls._of(profile_here(read_spec(folder), folder, wanted, progress))

    @classmethod
    def load(cls, file: str | Path) -> Self:
        """A profile from a JSON file, as `hetero-ee profile --json` prints it. Raises UsageError."""
        if not isinstance(file, str | Path) or not str(file):
            raise UsageError(f"the profile {shown(file)} is no file; give the path of one.")
        return cls._of(hardware_from(Path(file)))

    @classmethod
    def shipped(cls, name: str) -> Self:
        """The profile that was derived from the data sheets of that machine. Raises UsageError, which names them."""
        return cls._of(reference_profile(name))

    @classmethod
    def _of(cls, record: hardware.HardwareProfile) -> Self:
        return cls(**{field.name: getattr(record, field.name) for field in fields(record)})
