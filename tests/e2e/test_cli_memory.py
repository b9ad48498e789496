"""A process that may have less memory than its imports take: one sentence, and no traceback."""

import subprocess
import sys

import pytest

from hetero_ee_cli.__main__ import is_refusal_of_memory

resource = pytest.importorskip("resource", reason="limits as POSIX has them")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not keep to a limit of addresses")
LIMITS_MB = (40, 200, 400, 900)  # while torch's libraries are loaded; the last before Numba's


@pytest.mark.parametrize("limit_mb", LIMITS_MB)
@pytest.mark.usefixtures("cache")
@pytest.mark.sample(1)
def test_too_little_memory_for_the_imports(limit_mb: int) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit_mb * 10**6, limit_mb * 10**6))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    command = [sys.executable, "-m", "hetero_ee_cli", "generate", "Hello", "-n", "1"]
    run = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, preexec_fn=limit, timeout=300, check=False
    )
    if run.returncode not in (0, 1) and "Traceback" not in run.stderr:
        pytest.skip(f"a library ended the process itself: {run.stderr[-100:]!r}")  # nothing in Python can catch that
    if "Traceback" in run.stderr and "hetero_ee" not in run.stderr:
        pytest.skip("the interpreter failed outside all of our code")
    if run.returncode == 0:
        pytest.skip("the imports take less than that here")
    assert run.stdout == "" and "Traceback" not in run.stderr
    assert "too little memory" in run.stderr.splitlines()[-1]


def chained(first: Exception, second: Exception) -> Exception:
    second.__cause__ = first
    return second


@pytest.mark.parametrize(
    ("error", "is_refusal"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), True),
        (RuntimeError("can't start new thread"), True),
        (chained(OSError("failed to map segment from shared object"), OSError("Could not find libllvmlite.so")), True),
        (SystemError("error return without exception set"), True),
        (SystemError("<class 'type'> returned NULL without setting an exception"), True),
        (SystemError("bad argument to internal function"), False),
        (ImportError("No module named 'torch'"), False),
        (OSError(28, "No space left on device"), False),
        (ValueError("failed to map segment"), False),
    ],
)
def test_what_says_that_there_is_no_memory(error: Exception, is_refusal: bool) -> None:
    assert is_refusal_of_memory(error) is is_refusal
