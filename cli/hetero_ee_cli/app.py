"""The typer application, and the one place where errors become exit codes.

0 success, 1 failure, 2 usage, 130 interrupted (Ctrl-C), 141 the reader of a pipe went away, 143 terminated.
"""

import os
import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

import typer

from hetero_ee_cli.generate import generate

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED, EXIT_TERMINATED = 1, 2, 130, 141, 143

app = typer.Typer(
    name="hetero-ee",
    help="Runs large language models on a PC whose GPU memory is too small for them.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Runs large language models on a PC whose GPU memory is too small for them."""
    if version:
        import hetero_ee

        print(hetero_ee.__version__)
        raise typer.Exit()


def main() -> None:
    """Entry point of the `hetero-ee` script."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except KeyboardInterrupt:
        _leave(EXIT_INTERRUPTED)
    except BrokenPipeError:
        _leave(EXIT_PIPE_CLOSED)
    except Exception as error:
        _report(error)


def _report(error: Exception) -> NoReturn:
    """One sentence for a deliberate refusal; anything else is a defect of ours and keeps its traceback."""
    from hetero_ee.errors import HeteroError, UsageError

    if not isinstance(error, HeteroError):
        raise error
    print(f"hetero-ee: {_printable(str(error))}", file=sys.stderr)
    sys.exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILURE)


def _printable(message: str) -> str:
    """One line, control characters escaped: file and tensor names come from outside."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)


def _leave(code: int) -> NoReturn:
    """Ends without a message, whatever state the streams are in."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # a flush at exit must not fail again
    sys.exit(code)


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    """SIGTERM unwinds like an exception, so that half-written files are removed."""
    sys.exit(EXIT_TERMINATED)


if __name__ == "__main__":
    main()
