"""Read and write SLURM's form for one number per node: `4(x2),2`.

SLURM_TASKS_PER_NODE, SLURM_STEP_TASKS_PER_NODE and SLURM_JOB_CPUS_PER_NODE have this form. The order follows
the node list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

from slurmddp.errors import ConfigError

_PART = re.compile(r"(\d{1,9})(?:\(x(\d{1,6})\))?", re.ASCII)
_MOST_NODES = 1 << 20


def parse_counts(text: str) -> tuple[int, ...]:
    """Return one number per node: `4(x2),2` gives (4, 4, 2); raises ConfigError for another text."""
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
    """Return one number per node as SLURM writes it: (4, 4, 2) gives `4(x2),2`."""
    parts = []
    for count, group in groupby(counts):
        times = len(list(group))
        parts.append(f"{count}(x{times})" if times > 1 else str(count))
    return ",".join(parts)
