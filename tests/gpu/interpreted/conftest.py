"""Where these tests run: Triton's interpreter without two things that take two thirds of its time here, or PTX."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import triton.language as tl

from tests.gpu_support import HAS_PTX_JITTER, IS_INTERPRETED, PTX_ARCHITECTURE


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    """No look at every integer sum for an overflow: it wraps as on a GPU, and the result is compared. And a launch has
    prepared `tl` for its kernel; each call of a function of ours would do it again."""
    with pytest.MonkeyPatch.context() as patch:
        if IS_INTERPRETED and not PTX_ARCHITECTURE:
            from triton.runtime import interpreter

            builder, prepare = interpreter.interpreter_builder, interpreter.InterpretedFunction.__call__

            def called(function: Any, *arguments: Any, **options: Any) -> Any:
                if function.fn.__globals__.get("tl") is tl:
                    return function.rewrite()(*arguments, **options)
                return prepare(function, *arguments, **options)  # Triton's own, which say `core`

            patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
            patch.setattr(interpreter.InterpretedFunction, "__call__", called)
        yield


@pytest.fixture(scope="session")
def _launcher() -> Any:
    from tests.gpu.ptx.launcher import Launcher

    return Launcher(PTX_ARCHITECTURE, has_jitter=HAS_PTX_JITTER)


@pytest.fixture(autouse=True)
def _compiled_ptx(request: pytest.FixtureRequest) -> Iterator[None]:
    """If PTX_ARCHITECTURE says so, every launch of the test executes compiled PTX."""
    if not PTX_ARCHITECTURE:
        yield
        return
    with request.getfixturevalue("_launcher").reported(request.node):
        yield
