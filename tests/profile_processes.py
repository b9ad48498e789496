"""A first profile in a process of its own, whose measurement ends when the file `go` is there, and is written down."""

import math
import os
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hetero_ee.hub.config_file import read_spec
from hetero_ee.profiling import disturbance, measure
from hetero_ee.profiling.machine_profile import WAITING, Wanted, machine_profile
from hetero_ee_profiles.records import to_json
from hetero_ee_profiles.reference import reference_profile
from tests.families import config_of


def profile_slowly(family: str, data_folder: Path, cache_folder: Path, log: Path, events: Connection) -> None:
    """Sends "measuring" or "waiting", as it comes to it, and at the end the profile's text without the memory."""

    def noted(what: str) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()} {what}\n")

    def measured(model: Any, points: Any, n_threads: int, *more: Any) -> Any:
        noted("begins")
        events.send("measuring")
        while not log.with_name("go").exists():
            time.sleep(0.01)
        noted("ends")
        return replace(times, threads=n_threads)

    def progress(stage: str, n_done: int, n_all: int) -> None:
        if stage == WAITING:
            events.send("waiting")

    disturbance.BUSY_SHARE = math.inf  # this machine runs other tests
    (times,) = reference_profile("rtx-3060-12gb").cpu
    measure.measured_cpu = measured  # type: ignore[assignment]
    measure.probed_model = lambda *arguments: None  # type: ignore[assignment, return-value]
    found = machine_profile(
        read_spec(config_of(family)),
        Wanted(quick=True, refresh=False, threads=(), command=family),
        data_folder=data_folder,
        cache_folder=cache_folder,
        disk_file=None,
        clock=time.perf_counter,
        open_gpu=lambda model: None,
        progress=progress,
    )
    events.send(to_json(replace(found, cpu=tuple(replace(each, free_bytes=0) for each in found.cpu))))
