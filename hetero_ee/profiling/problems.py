"""Words for the user when a measurement fails."""

MAX_REASON_CHARACTERS = 200  # of a driver's message
REFRESH = "`hetero-ee profile --refresh MODEL` measures again"
WITHOUT_GPU = f"plans use the CPU alone; `hetero-ee doctor` says more, {REFRESH}"


def reason(error: BaseException) -> str:
    """Return the error's first line, shortened and printable."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    line = line if line.isprintable() else ascii(line)[1:-1]
    return line if len(line) <= MAX_REASON_CHARACTERS else line[: MAX_REASON_CHARACTERS - 3] + "..."
