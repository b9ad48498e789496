"""Describes the operating system, and whether it runs in WSL or a container."""

from dataclasses import dataclass

from hetero_ee_profiles.host.host import Host

SYSTEMS = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}


@dataclass(frozen=True, slots=True)
class SystemInfo:
    name: str
    distribution: str  # name of a Linux distribution, else empty
    release: str
    libc: str  # name and version, empty if it is not glibc
    is_wsl: bool
    is_container: bool


def system_info(host: Host) -> SystemInfo:
    lines = (host.text("/etc/os-release") or "").splitlines()
    named = [line.partition("=")[2].strip("\"' ") for line in lines if line.startswith("PRETTY_NAME=")]
    markers = ("/.dockerenv", "/run/.containerenv")
    return SystemInfo(
        name=SYSTEMS.get(host.system, host.system),
        distribution=named[0] if named else "",
        release=host.release,
        libc=host.libc,
        is_wsl="microsoft" in host.release.lower(),
        is_container=any(host.text(marker) is not None for marker in markers),
    )
