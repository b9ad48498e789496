"""Times reading memory: what no kernel that reads weights can beat."""

import numpy as np

from hetero_ee_cpu_ops.read import Read
from hetero_ee_cpu_ops.team import Team
from hetero_ee_profiles.probe_samples import Clock

READ_BYTES = 2**28


def probe_read_bytes_per_s(team: Team, repeats: int, clock: Clock) -> list[float]:
    """Memory read bandwidth on the team's threads."""
    read, buffer = Read(team), np.ones(READ_BYTES // 8, np.int64)
    read(buffer)
    rates = []
    for _ in range(repeats):
        start_s = clock()
        read(buffer)
        rates.append(buffer.nbytes / (clock() - start_s))
    return rates
