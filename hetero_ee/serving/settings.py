"""How a server is reached and what it takes."""

from dataclasses import dataclass
from ipaddress import ip_address

from hetero_ee.errors import UsageError, shown

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Raises UsageError for values that make no sense, and for an address that others reach without a key."""

    host: str = "127.0.0.1"
    port: int = 8080  # 0 takes a free one
    api_key: str | None = None
    insecure: bool = False  # an address that others reach may be without a key
    cors_origins: tuple[str, ...] = ()  # whose pages may ask, such as http://localhost:3000
    n_slots: int = 4  # texts at a time
    queue_size: int = 64  # requests that may wait beside them
    request_timeout_s: float = 600.0  # of a whole answer, waiting included
    body_timeout_s: float = 30.0  # for a request's body to arrive
    max_body_bytes: int = 2 * 2**20
    ping_s: float = 15.0  # between signs of life in a stream that has nothing to say
    model_name: str = "hetero-ee"  # as clients see it

    def __post_init__(self) -> None:
        for name, low, high in (("port", 0, 65535), ("n_slots", 1, 64), ("queue_size", 0, 10_000)):
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"{name} is {getattr(self, name)}; expected {low} to {high}.")
        if not 0 < self.request_timeout_s <= 86_400:
            raise UsageError(f"request_timeout_s is {self.request_timeout_s:g}; expected seconds, above 0 to 86400.")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise UsageError("api_key is empty or holds characters that no header can; expected printable ASCII.")
        for origin in self.cors_origins:
            if not origin.startswith(("http://", "https://")) or origin.count("/") != 2:
                raise UsageError(f"cors_origin is {shown(origin)}; expected one like http://localhost:3000.")
        if not self.is_local and self.api_key is None and not self.insecure:
            raise UsageError(
                f"host {self.host} can be reached by others; give an --api-key, or --insecure to let anyone in."
            )

    @property
    def is_local(self) -> bool:
        """Whether this machine alone reaches the address."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:  # a name, which may be anyone's
            return False
