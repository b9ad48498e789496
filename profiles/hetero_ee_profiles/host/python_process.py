"""Start another Python process that works for this one."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def start_python(arguments: Sequence[str], stdout: int = subprocess.DEVNULL) -> "subprocess.Popen[bytes]":
    """Start Python with this process's import path, a pipe as standard input, and no standard error.

    Ctrl-C in the terminal does not reach the process.

    Args:
        arguments: arguments of the interpreter, such as ["-m", "module"].
        stdout: subprocess.PIPE to read the process's output. By default it is discarded.

    Raises:
        OSError: if the process can't be started.
    """
    own_group: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        own_group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command, pipe = [sys.executable, "-P", *arguments], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=stdout, stderr=subprocess.DEVNULL, env=environment, **own_group)
