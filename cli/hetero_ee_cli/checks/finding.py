"""Results of checks, and the function that runs the checks. A failed check does not end the command."""

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
N_WORKERS = 4  # checks mostly wait for other processes


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check, with advice if something is wrong."""

    status: Status
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A finding with the name of its check, without the user's name and home folder."""

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
    """Run all checks, several at a time. Return one row per check, in order."""
    pool = ThreadPoolExecutor(N_WORKERS)
    try:
        findings = list(pool.map(_found, checks.values()))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait
    return [
        Row(name, finding.status, presentable(finding.text), presentable(finding.advice))
        for name, finding in zip(checks, findings, strict=True)
    ]


def _found(check: Check) -> Finding:
    try:
        return check()
    except Exception as error:
        return warn(f"can't be determined ({type(error).__name__}: {error})", "Report this if it causes trouble.")


def once(function: Callable[[], T]) -> Callable[[], T]:
    """Return a function that runs `function` in its first call only and caches the result, even if threads share it."""
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
    """Return the text as one printable line, without the home folder's path and the user's name."""
    line = "".join(c if c.isprintable() else " " for c in text)
    for home in _home_folders():
        line = re.sub(re.escape(home) + r"(?![\w.-])", "~", line)
    if user := _user_name():
        line = re.sub(rf"(?<=[/\\]){re.escape(user)}(?=[/\\\s,;:)]|$)", "user", line)
    return line.strip()


def _home_folders() -> list[str]:
    """Return the home folder and its resolved path, without root folders."""
    try:
        home = Path.home()
        return [str(folder) for folder in (home, home.resolve()) if folder != Path(folder.anchor)]
    except (OSError, RuntimeError):
        return []


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return ""
