"""Entry point of the process for `hetero-ee` and `python -m hetero_ee_cli`."""

import errno
import os
import sys

from hetero_ee_cli.terminal.signals import ending_at_once, leave

EXIT_FAILURE = 1
NO_MEMORY = (
    "hetero-ee: there is too little memory to run, or no thread is granted; end other programs, or raise this "
    "process's limits (ulimit -v and -u, a container's)."
)
SAYING = (ImportError, OSError, RuntimeError, SystemError)
# By the loader of shared objects, torch's allocator, Python's threads; last by Python's own imports, which lose a
# MemoryError on its way (Python 3.11 within 45 MB).
REFUSALS = (
    *("failed to map segment", "annot allocate memory", "can't allocate memory", "can't start new thread"),
    *("without exception set", "without setting an exception"),
)


def main() -> None:
    # These threads are not needed. If none is granted, NumPy's BLAS sends SIGINT, and the tokenizer prints a traceback.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with ending_at_once():  # Ctrl-C while the command line itself is imported
            from hetero_ee_cli.app import main as run
        run()
    except SystemExit as ending:
        if isinstance(ending.code, str):
            raise
        leave(ending.code or 0)  # Python would first free all that was imported, for 0.6 s
    except Exception as error:
        if not is_refusal_of_memory(error):
            raise
        print(NO_MEMORY, file=sys.stderr)
        leave(EXIT_FAILURE)


def is_refusal_of_memory(error: BaseException) -> bool:
    """Return whether the error, or one of its causes, reports too little memory."""
    seen = set[int]()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, MemoryError) or getattr(link, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(link, SAYING) and any(text in str(link) for text in REFUSALS):
            return True
        link = link.__cause__ or link.__context__
    return False


if __name__ == "__main__":
    main()
