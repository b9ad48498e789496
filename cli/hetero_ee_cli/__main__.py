"""Entry point of the process: `hetero-ee`, and `python -m hetero_ee_cli`."""

import os
import sys

from hetero_ee_cli.terminal.memory import is_refusal_of_memory
from hetero_ee_cli.terminal.signals import ending_at_once, leave

EXIT_FAILURE = 1
NO_MEMORY = (
    "hetero-ee: there is too little memory to run, or no thread is granted; end other programs, or raise this "
    "process's limits (ulimit -v and -u, a container's)."
)


def main() -> None:
    """Run the `hetero-ee` script."""
    # These threads are not needed. If none is granted, NumPy's BLAS sends SIGINT, and the tokenizer prints a traceback.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with ending_at_once():  # Ctrl-C while the command line itself is imported
            from hetero_ee_cli.app import main as run
        run()
    except Exception as error:
        if not is_refusal_of_memory(error):
            raise
        print(NO_MEMORY, file=sys.stderr)
        leave(EXIT_FAILURE)


if __name__ == "__main__":
    main()
