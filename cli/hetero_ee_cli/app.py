"""The typer application. Only this module turns errors into exit codes.

0: success. 1: a later failure: the content of a model's folder, the Hub, or lack of memory. 2: an error in the typed
command: an option, its value, the file it names, or a model that is neither a folder nor an id. 28: disk full. 130:
interrupted (Ctrl-C). 141: broken pipe. 143: terminated.
"""

import errno
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from hetero_ee.config.settings import Settings
from hetero_ee.errors import DiskFullError, HeteroError, UsageError
from hetero_ee_cli.checks.configuration import variables
from hetero_ee_cli.checks.finding import Status
from hetero_ee_cli.commands import config, models
from hetero_ee_cli.commands.bench import bench
from hetero_ee_cli.commands.calibrate import calibrate
from hetero_ee_cli.commands.chat import chat
from hetero_ee_cli.commands.convert import convert, pull
from hetero_ee_cli.commands.doctor import doctor
from hetero_ee_cli.commands.eval import eval
from hetero_ee_cli.commands.generate import generate
from hetero_ee_cli.commands.plan import plan
from hetero_ee_cli.commands.profile import profile
from hetero_ee_cli.commands.run import run
from hetero_ee_cli.commands.search import search
from hetero_ee_cli.commands.serve import serve
from hetero_ee_cli.commands.simulate import simulate
from hetero_ee_cli.options.command import HeteroCommand
from hetero_ee_cli.terminal.output import complain
from hetero_ee_cli.terminal.signals import EXIT_INTERRUPTED, leave, raise_on_sigterm
from hetero_ee_cli.terminal.streams import filter_terminals, make_writable

EXIT_FAILURE, EXIT_USAGE, EXIT_DISK_FULL, EXIT_PIPE_CLOSED = 1, 2, 28, 141
HELP = "Runs large language models on a PC whose GPU memory is too small for them."


def _answered(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap the command so that its errors become exit codes. typer's own codes for Ctrl-C and pipes differ."""

    @functools.wraps(command)
    def answer(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (KeyboardInterrupt, SystemExit) as ending:
            for note in getattr(ending, "__notes__", ()):  # for example that the work can be resumed
                complain(note)
            if isinstance(ending, KeyboardInterrupt):
                leave(EXIT_INTERRUPTED)
            raise
        except BrokenPipeError:
            leave(EXIT_PIPE_CLOSED)

    return answer


app = typer.Typer(
    name="hetero-ee",
    help=HELP,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    *(run, generate, chat, serve, search, pull),
    *(plan, profile, simulate, calibrate, bench, eval, convert, doctor),
):
    app.command(cls=HeteroCommand)(_answered(command))
models_app = typer.Typer(name="models", rich_markup_mode=None)
models_app.callback(invoke_without_command=True)(_answered(models.models))
models_app.command("list", cls=HeteroCommand)(_answered(models.list_models))
models_app.command(cls=HeteroCommand)(_answered(models.verify))
models_app.command(cls=HeteroCommand)(_answered(models.remove))
app.add_typer(models_app)
config_app = typer.Typer(name="config", help="Settings and where they come from.", rich_markup_mode=None)
config_app.command(cls=HeteroCommand)(_answered(config.show))
app.add_typer(config_app)


def _print_version(wanted: bool) -> None:
    if wanted:
        import hetero_ee

        print(hetero_ee.__version__)
        raise typer.Exit()


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    found = variables(Settings(Path(), environment=os.environ))
    if found.status is Status.WARN and context.invoked_subcommand != doctor.__name__:  # which says so itself
        complain(f"HETERO_EE_ variable {found.text}. {found.advice}")


def main() -> None:
    raise_on_sigterm()
    make_writable()
    filter_terminals()
    try:
        try:
            code = _run_app()
        finally:
            print(end="", flush=True)  # Python would flush at the very end, and complain in its own words
    except BrokenPipeError:
        leave(EXIT_PIPE_CLOSED)
    except KeyboardInterrupt:  # before or behind a command
        leave(EXIT_INTERRUPTED)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        complain(f"the output can't be written: the disk is full ({error.strerror}).")
        leave(EXIT_DISK_FULL)
    sys.exit(code)


def _run_app() -> Any:
    """Run the application. An expected error is printed as one sentence; any other is a bug and keeps its traceback."""
    try:
        return app(sys.argv[1:] or ["--help"], prog_name="hetero-ee", standalone_mode=False)
    except HeteroError as error:
        code = EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILURE
        _fail(str(error), EXIT_DISK_FULL if isinstance(error, DiskFullError) else code)
    except typer.Abort:  # typer's exception for Ctrl-C outside of a command
        leave(EXIT_INTERRUPTED)
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's errors have it; typer has its own copy of click
            raise
        message = str(error.format_message())
        path = getattr(getattr(error, "ctx", None), "command_path", "hetero-ee")
        _fail(f"{message}{'' if message.endswith(('.', '?')) else '.'} See {path} --help.", EXIT_USAGE)


def _fail(message: str, code: int) -> NoReturn:
    complain(message)
    sys.exit(code)


if __name__ == "__main__":
    main()
