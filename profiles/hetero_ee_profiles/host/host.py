"""Access to facts about the machine (files, commands, psutil), which tests replace by recordings."""

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
TIMEOUT_S = 2.0  # for a command; a GPU driver in trouble never answers
END_TIMEOUT_S = 0.5  # from a command's last output to its exit


@dataclass(frozen=True, slots=True)
class Answer:
    output: str = ""  # standard output
    problem: str = ""  # empty if it succeeded, else the reason in a few words


@dataclass(frozen=True, slots=True)
class CoreCounts:
    """Numbers of physical cores, hardware threads, and threads that this process may use; None if unknown."""

    physical: int | None
    logical: int | None
    allowed: int | None


@dataclass(frozen=True, slots=True)
class MemoryCounts:
    """Bytes of memory in total, available to programs, and of swap."""

    total: int
    available: int
    swap: int


@dataclass(frozen=True, slots=True)
class Host:
    """Sources of facts about the machine."""

    system: str  # as sys.platform
    architecture: str  # this, release and libc as in the platform module
    release: str
    libc: str
    text: Callable[[str], str | None]  # a file's contents, None if it cannot be read
    names: Callable[[str], list[str]]  # a folder's entries in order, none if it cannot be read
    run: Callable[[Sequence[str], float], Answer]  # runs a command with a time limit in seconds; never raises
    core_counts: Callable[[], CoreCounts]
    memory_counts: Callable[[], MemoryCounts]


def this_host() -> Host:
    """Return the sources of facts about this computer."""
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
    """Return up to MAX_TEXT_BYTES of the file as text, None if it cannot be read."""
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
    """Run a command for at most timeout_s seconds, even if it cannot be killed."""
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
    except RuntimeError as error:  # the system refuses more threads
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
    """Return why a process that closed its output failed, or "". Processes that don't exit are killed."""
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
