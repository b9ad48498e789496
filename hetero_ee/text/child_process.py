"""Run a Python program in its own process, to work on untrusted input that must not bring down this process."""

import json
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hetero_ee_profiles.host.python_process import start_python


class ChildProcess:
    """A Python program that prints a line when it is ready, and answers each line of JSON with a line of JSON.

    The process starts with the first request, and again if a request has failed or the process has died. Only kill()
    may be called from another thread.
    """

    def __init__(self, arguments: Sequence[str], start_seconds: float, first: Any = None) -> None:
        """Store the interpreter's arguments. `first` is sent to the program before it is ready, unless None."""
        self._arguments, self._start_seconds, self._first = list(arguments), start_seconds, first
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Any, longest: int, seconds: float) -> Any:
        """Send a request and return the answer of at most `longest` bytes. An exception, even Ctrl-C, ends the process.

        Raises:
            OSError: if the process can't be started.
            TimeoutError: if the answer takes longer than `seconds`.
            EOFError: if the process has died, or the answer is too long.
        """
        try:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._start()
            return json.loads(self._exchange(_line(request), longest, seconds))
        except BaseException:
            self.close()
            raise

    def kill(self) -> None:
        """End the process, from any thread. A request in progress then fails."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # unsent data cannot be flushed
                    pipe.close()
        process.wait()

    def _start(self) -> None:
        self._process = start_python(self._arguments, stdout=subprocess.PIPE)
        self._exchange(b"" if self._first is None else _line(self._first), 2**16, self._start_seconds)

    def _exchange(self, request: bytes, longest: int, seconds: float) -> bytes:
        """Write the request and read a line; kill the process if that exceeds `seconds`."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            answer = process.stdout.readline(longest)
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
            timer.join()  # so that it can't kill the process in a later request
        if expired.is_set():
            raise TimeoutError(f"no answer within {seconds:g} s")
        if not answer.endswith(b"\n"):
            raise EOFError("the process has died")
        return answer


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"
