"""Online audit: detects whether exits differ from the full model's choice more often than the certificate allows.

The test is a bet (Ville's inequality; Ramdas et al., arXiv 2210.01948). Purses bet that an audited exit differs. The
odds are such that no purse gains on average while exits differ with a chance of at most `most`. The chance that the
purses' mean ever reaches 1 / FALSE_ALARM is then at most FALSE_ALARM, however long the test runs and however often it
is checked. Exits of one sequence are not independent, but audited exits are so rare that a sequence has one or two.
"""

import hashlib
import math
import struct

from hetero_ee.errors import UsageError, shown

FALSE_ALARM = 0.01
AUDITED_SHARE = 0.02
STAKES = (0.5, 0.25, 0.125, 0.0625)  # shares of the purse that an exit costs if it does not differ


class ExitAudit:
    """A running test of how often exits differ from the full model's choice. `most` is the share of exits that may
    differ: the risk divided by the share of tokens that exit. Above 1, all may."""

    def __init__(self, most: float) -> None:
        if not most > 0:  # false for NaN too
            raise UsageError(f"the share of exits that may differ is {shown(most)}; expected a number above 0.")
        self._most = min(1.0, most)
        self._log_purses = [0.0 for _ in STAKES]
        self._log_best = 0.0
        self.n_audited = self.n_different = 0

    def observe(self, differs: bool) -> None:
        """Record whether the full model chose another token at an audited exit."""
        self.n_audited += 1
        self.n_different += differs
        for place, stake in enumerate(STAKES):
            gain = stake * (1 - self._most) / self._most if differs else -stake
            self._log_purses[place] += math.log1p(gain)
        top = max(self._log_purses)
        mean = math.log(sum(math.exp(each - top) for each in self._log_purses) / len(STAKES)) + top
        self._log_best = max(self._log_best, mean)

    @property
    def is_breached(self) -> bool:
        """Whether the audit has ever found that exits differ too often."""
        return self._log_best >= -math.log(FALSE_ALARM)


def is_audited(seed: int, sequence: int, position: int, share: float = AUDITED_SHARE) -> bool:
    """Return whether the exit at this position is audited. A hash decides, so that every run audits the same exits."""
    data = struct.pack("<3Q", *(each % 2**64 for each in (seed, sequence, position)))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") < share * 2**64
