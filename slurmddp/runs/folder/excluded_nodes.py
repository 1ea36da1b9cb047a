"""The nodes that failed under a run: batch step and preflight record them, and later attempts avoid them."""

from __future__ import annotations

import time

from slurmddp.errors import SlurmddpError
from slurmddp.runs.folder.jsonl import append_line, read_lines
from slurmddp.runs.folder.layout import RunFolder


def excluded_nodes(folder: RunFolder, now: float | None = None, *, since: float = 0.0) -> list[str]:
    """Return the nodes whose exclusion has not expired, sorted; empty if the file is damaged.

    Args:
        folder: of the run.
        now: the time at which the exclusion must still hold; 0 for all nodes that ever failed.
        since: leaves out nodes that were recorded before this time.
    """
    at = time.time() if now is None else now
    try:
        entries = list(read_lines(folder.excluded_file))
    except SlurmddpError:  # Exclusions are only advice: a damaged file must not stop a run.
        return []
    held = (one for one in entries if one.get("node") and _time(one, "expires") > at)
    return sorted({str(one["node"]) for one in held if _time(one, "time") >= since})


def exclude(folder: RunFolder, node: str, reason: str, *, hours: int, now: float | None = None) -> None:
    """Exclude `node` from the attempts of the next `hours`."""
    at = int(time.time() if now is None else now)
    line = {"time": at, "node": node, "reason": reason, "expires": at + hours * 3600}
    append_line(folder.excluded_file, line)


def _time(entry: dict[str, object], key: str) -> float:
    found = entry.get(key)
    return float(found) if isinstance(found, (int, float)) else 0.0
