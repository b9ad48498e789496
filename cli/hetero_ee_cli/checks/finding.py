"""One finding of a check, and the checks' runner, which lets none of them end the command."""

import getpass
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from threading import Lock
from typing import TypeVar

T = TypeVar("T")
Check = Callable[[], "Finding"]
N_WORKERS = 4  # checks wait for other processes most of the time


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, and what to do about it where something should be done."""

    status: Status
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A finding with its check's name, fit to be shown to anybody."""

    name: str
    status: Status
    finding: str
    advice: str


def ok(text: str) -> Finding:
    return Finding(Status.OK, text)


def warn(text: str, advice: str) -> Finding:
    return Finding(Status.WARN, text, advice)


def fail(text: str, advice: str) -> Finding:
    return Finding(Status.FAIL, text, advice)


def examine(checks: Mapping[str, Check]) -> list[Row]:
    """Runs all checks, several at a time, and returns their rows in order."""
    pool = ThreadPoolExecutor(N_WORKERS)
    try:
        findings = list(pool.map(_found, checks.values()))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C waits for nobody
    return [
        Row(name, finding.status, presentable(finding.text), presentable(finding.advice))
        for name, finding in zip(checks, findings, strict=True)
    ]


def _found(check: Check) -> Finding:
    try:
        return check()
    except Exception as error:
        return warn(f"can't be determined ({type(error).__name__}: {error})", "Report this if it stands in your way.")


def once(function: Callable[[], T]) -> Callable[[], T]:
    """The function with its result kept: checks in several threads may ask for it, and it runs once."""
    lock, kept = Lock(), list[T]()

    def run() -> T:
        with lock:
            if not kept:
                kept.append(function())
            return kept[0]

    return run


def gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"


def presentable(text: str) -> str:
    """One printable line without the home folder's place and the user's name."""
    line = "".join(c if c.isprintable() else " " for c in text)
    for home in _home_folders():
        line = re.sub(re.escape(home) + r"(?![\w.-])", "~", line)
    if user := _user_name():
        line = re.sub(rf"(?<=[/\\]){re.escape(user)}(?=[/\\\s,;:)]|$)", "user", line)
    return line.strip()


def _home_folders() -> list[str]:
    """The home folder, also as links resolve it; a root folder is nobody's."""
    try:
        home = Path.home()
        return [str(place) for place in (home, home.resolve()) if place != Path(place.anchor)]
    except (OSError, RuntimeError):
        return []


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return ""
