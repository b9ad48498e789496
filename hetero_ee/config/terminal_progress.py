"""Show progress if the caller gave no function: tqdm's bars on a terminal or in a notebook, else nothing."""

import sys
from typing import TYPE_CHECKING

from hetero_ee.config import BYTE_STAGES, READING, Progress
from hetero_ee.errors import UsageError, shown

if TYPE_CHECKING:
    from tqdm import tqdm

SHOWN_AFTER_S = 1.0  # delay before a prompt's bar is shown, as most prompts need less


def chosen_progress(progress: Progress | bool | None) -> Progress | None:
    """Return the function that reports progress: bars for True, and for None if someone sees them. False means none."""
    if callable(progress):
        return progress
    if progress is not None and not isinstance(progress, bool):
        raise UsageError(f"progress is {shown(progress)}; expected a function, True, False or None.")
    # A notebook's standard error isn't a terminal, but tqdm knows how to draw there.
    is_watched = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    return TerminalProgress() if progress or (progress is None and is_watched) else None


class TerminalProgress:
    """Shows a bar for each stage, which disappears at the stage's end, and a line for each remark."""

    def __init__(self) -> None:
        self._bars: dict[str, tqdm[None]] = {}

    def __call__(self, stage: str, n_done: int, n_all: int) -> None:
        from tqdm.auto import tqdm

        if n_all == 0:
            tqdm.write(f"{stage.removesuffix('.')}.", file=sys.stderr)
            return
        if stage not in self._bars:
            self._bars[stage] = tqdm(
                desc=stage,
                total=n_all,
                initial=n_done,
                leave=False,
                unit="B" if stage.startswith(BYTE_STAGES) else "it",
                unit_scale=True,
                file=sys.stderr,
                delay=SHOWN_AFTER_S if stage == READING else 0,
            )
        bar = self._bars[stage]
        bar.update(n_done - bar.n)
        if n_done >= n_all:
            self._bars.pop(stage).close()
