"""Settings of the server, checked."""

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from hetero_ee.errors import UsageError, shown
from hetero_ee.options.option import Option, options_of

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
N_EXPRESS = 1  # slots in addition, for short prompts that would wait while long ones are read


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Address, access control and limits of a server.

    Raises:
        UsageError: if a value is impossible, or others can reach the address without a key.
    """

    host: Annotated[str, Option(help="Address to listen on.", flags=("--host",))] = "127.0.0.1"
    port: Annotated[
        int, Option(help="Port to listen on; 0 picks a free one.", least=0, most=65535, flags=("--port",))
    ] = 8080
    api_key: Annotated[str | None, Option(help="Key that requests have to bring.", flags=("--api-key",))] = None
    insecure: Annotated[
        bool,
        Option(
            help="Listen on an address that others reach, without a key.", default_text="false", flags=("--insecure",)
        ),
    ] = False
    cors_origins: Annotated[
        tuple[str, ...],
        Option(
            help="Allow web pages of this origin to send requests (CORS), such as http://localhost:3000; can be given "
            "more than once.",
            typed=list[str],
            flags=("--cors-origin",),
        ),
    ] = ()
    n_slots: Annotated[
        int, Option(help="Number of requests that run at a time.", least=1, most=64, flags=("-np", "--parallel"))
    ] = 4
    queue_size: Annotated[
        int, Option(help="Requests that may wait in addition.", least=0, most=10_000, flags=("--queue",))
    ] = 64
    request_timeout_s: Annotated[
        float,
        Option(
            help="Seconds that an answer may take, waiting included.",
            least=0.0,
            most=86_400,
            excludes_least=True,
            unit="seconds",
            flags=("--timeout",),
        ),
    ] = 600.0
    body_timeout_s: float = 30.0  # for a request's body to arrive
    max_body_bytes: int = 2 * 2**20
    page_temperature: float | None = None  # default of the chat page; None: the model's own, or 0.8 if that is greedy
    ping_s: float = 15.0  # between signs of life in a stream that has nothing to say
    models_max: Annotated[
        int,
        Option(
            help="Models in memory at a time; the least recently used one makes room for the next.",
            least=1,
            most=64,
            flags=("--models-max",),
        ),
    ] = 1
    slot_save_path: Annotated[
        Path | None,
        Option(
            help="Folder in which clients may save slots, the keys and values of chats.", flags=("--slot-save-path",)
        ),
    ] = None
    model_name: Annotated[
        str, Option(help="The only model's name for clients.", default_text="its own", flags=("--alias",))
    ] = "hetero-ee"

    def __post_init__(self) -> None:
        for name in ("port", "n_slots", "queue_size", "request_timeout_s", "models_max"):
            SERVER_OPTIONS[name].check(getattr(self, name))
        key, origin_option = SERVER_OPTIONS["api_key"], SERVER_OPTIONS["cors_origins"]
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise UsageError(key, " is empty or holds characters that no header can; expected printable ASCII.")
        for origin in self.cors_origins:
            if not origin.startswith(("http://", "https://")) or origin.count("/") != 2:
                raise UsageError(origin_option, f" is {shown(origin)}; expected one like http://localhost:3000.")
        if self.slot_save_path is not None:
            _check_folder(self.slot_save_path)
        if not self.is_local and self.api_key is None and not self.insecure:
            reached = f" {self.host} can be reached by others; give an --api-key, or --insecure to let anyone in."
            raise UsageError(SERVER_OPTIONS["host"], reached)

    @property
    def n_sequences(self) -> int:
        """Number of sequences that may be open at a time, which plans count."""
        return self.n_slots + N_EXPRESS

    @property
    def is_local(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:  # a name, which may be anyone's
            return False


def _check_folder(folder: Path) -> None:
    """Check that slots can be saved in the folder, which may not exist yet. Raises: UsageError: if not."""
    try:
        existing = next((each for each in (folder, *folder.parents) if each.exists()), folder)
        problem = None if existing.is_dir() else f"{existing} is not a folder"
    except OSError as error:
        problem = error.strerror
    if problem is not None:
        raise UsageError(SERVER_OPTIONS["slot_save_path"], f" is {folder}, but {problem}; choose another folder.")


SERVER_OPTIONS = options_of(ServerSettings)
