"""The machine as facts about it are read: files, commands and psutil, as a seam that tests fill with recorded ones."""

import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import psutil

MAX_TEXT_BYTES = 2**22  # /proc/cpuinfo of a server with 512 threads has 1 MiB
TIMEOUT_S = 2.0  # of a command; a GPU driver in trouble never answers
END_TIMEOUT_S = 0.5  # from a command's last output to its end


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a command."""

    output: str = ""  # standard output
    problem: str = ""  # empty where it ended well, else why not, in a few words


@dataclass(frozen=True, slots=True)
class CoreCounts:
    """Physical cores, hardware threads, and those of them that this process may run on. None: unknown."""

    physical: int | None
    logical: int | None
    allowed: int | None


@dataclass(frozen=True, slots=True)
class MemoryCounts:
    """Bytes of memory and of swap in all."""

    total: int
    available: int
    swap: int


@dataclass(frozen=True, slots=True)
class Host:
    """Where facts come from."""

    system: str  # as sys.platform
    architecture: str  # this, release and libc as the platform module has them
    release: str
    libc: str
    text: Callable[[str], str | None]  # a file's contents, None where it can't be read
    names: Callable[[str], list[str]]  # a folder's entries in order, none where it can't be read
    run: Callable[[Sequence[str], float], Answer]  # a command, its arguments and a limit in seconds; never raises
    core_counts: Callable[[], CoreCounts]
    memory_counts: Callable[[], MemoryCounts]


def this_host() -> Host:
    """The machine this process runs on."""
    return Host(
        system=sys.platform,
        architecture=platform.machine(),
        release=platform.release(),
        libc=" ".join(platform.libc_ver()).strip(),
        text=read_text,
        names=entry_names,
        run=run_command,
        core_counts=_core_counts,
        memory_counts=_memory_counts,
    )


def read_text(path: str) -> str | None:
    """The file's text, at most MAX_TEXT_BYTES of it."""
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_TEXT_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


def entry_names(folder: str) -> list[str]:
    try:
        return sorted(entry.name for entry in Path(folder).iterdir())
    except OSError:
        return []


def run_command(command: Sequence[str], timeout_s: float = TIMEOUT_S) -> Answer:
    """Runs `command` and waits no longer than the time limit, even for a process that can't be killed."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdin=null, stdout=pipe, stderr=null)
    except (OSError, ValueError):
        return Answer(problem="not found")
    if process.stdout is None:
        return Answer(problem="no output")
    stdout = process.stdout
    found: list[bytes] = []

    def read() -> None:
        with stdout:
            found.append(stdout.read(MAX_TEXT_BYTES))

    reader = Thread(target=read, daemon=True)
    try:
        reader.start()
    except RuntimeError as error:  # the system gives no more threads
        stdout.close()
        process.kill()
        process.wait()
        return Answer(problem=str(error))
    reader.join(timeout_s)
    problem = f"no answer within {timeout_s:g} s" if reader.is_alive() else ""
    if not problem and len(found[0]) == MAX_TEXT_BYTES:
        problem = "endless output"
    if problem:
        process.kill()
    why_ended = _why_ended(process)
    return Answer(found[0].decode("utf-8", "replace") if found else "", problem or why_ended)


def _why_ended(process: "subprocess.Popen[bytes]") -> str:
    """Why a process that says nothing more did not end well. One that goes on without its output is killed."""
    try:
        code = process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
        return "did not end after its output"
    return f"exit code {code}" if code else ""


def _core_counts() -> CoreCounts:
    affinity = psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else None
    return CoreCounts(psutil.cpu_count(logical=False), psutil.cpu_count(), len(affinity) if affinity else None)


def _memory_counts() -> MemoryCounts:
    memory = psutil.virtual_memory()
    return MemoryCounts(memory.total, memory.available, psutil.swap_memory().total)
