"""How SLURM writes one number per node (`4(x2),2`), read and written without SLURM.

The same form serves SLURM_TASKS_PER_NODE, SLURM_STEP_TASKS_PER_NODE and SLURM_JOB_CPUS_PER_NODE; the order
is that of the node list which goes with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

from slurmddp.errors import ConfigError

_PART = re.compile(r"(\d{1,9})(?:\(x(\d{1,6})\))?", re.ASCII)
_MOST_NODES = 1 << 20


def parse_counts(text: str) -> tuple[int, ...]:
    """Return one number per node: `4(x2),2` is (4, 4, 2); raises ConfigError on anything else."""
    counts: list[int] = []
    for part in text.strip().split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"{text!r} is not a list of counts per node: {part!r} is neither `N` nor `N(xM)`.",
                hint="SLURM writes it as in `4(x2),2`: two nodes with 4 and one with 2.",
            )
        times = int(match[2] or 1)
        if len(counts) + times > _MOST_NODES:
            raise ConfigError(f"{text!r} counts more than {_MOST_NODES} nodes.", hint="Check the variable.")
        counts.extend([int(match[1])] * times)
    return tuple(counts)


def render_counts(counts: Iterable[int]) -> str:
    """Write one number per node as SLURM does: (4, 4, 2) is `4(x2),2`."""
    parts = []
    for count, group in groupby(counts):
        times = len(list(group))
        parts.append(f"{count}(x{times})" if times > 1 else str(count))
    return ",".join(parts)
