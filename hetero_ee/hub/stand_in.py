"""Recognises what often lies in place of a model's file."""

_BEGINNINGS = (
    (b"version https://git-lfs", "is a Git LFS pointer in place of the file itself; run `git lfs pull` in that folder"),
    (b"<", "is a web page in place of the file; download it again"),
    (b"GGUF", "is a GGUF file; give the original checkpoint in safetensors"),
    (
        b"PK\x03\x04",
        "is a zip archive, perhaps a pickle of torch.save, which is never opened; convert it to safetensors",
    ),
    (b"\x80", "is a pickle, which can run code when opened and is never read; convert it to safetensors"),
    (b"\x89HDF", "is an HDF5 file; give the original checkpoint in safetensors"),
    (b"\x1f\x8b", "is compressed; unpack it with gunzip"),
    (b"\xff\xfe", "is UTF-16 text; save it as UTF-8"),
    (b"\xfe\xff", "is UTF-16 text; save it as UTF-8"),
    (b"\xef\xbb\xbf", "begins with a byte order mark; save it as UTF-8 without one"),
    (bytes(16), "begins with zeros, as an unfinished download does; get the file again"),
)


def stand_in(start: bytes) -> str | None:
    """What a file unfit for its purpose is by its first bytes, and the way out; None where nothing is recognised."""
    if not start:
        return "is empty; get the file again"
    return next((what for beginning, what in _BEGINNINGS if start.lstrip(b" \t\r\n").startswith(beginning)), None)
