"""The nodes that failed under a run, which its next attempts avoid; batch script and preflight note them."""

from __future__ import annotations

import time

from slurmddp.errors import SlurmddpError
from slurmddp.runs.folder.layout import RunFolder, append_line, read_lines


def excluded_nodes(folder: RunFolder, now: float | None = None) -> list[str]:
    """Return the nodes whose exclusion has not expired, sorted; none if the file is damaged."""
    at = time.time() if now is None else now
    try:
        entries = list(read_lines(folder.excluded_file))
    except SlurmddpError:  # It is an advice, and no reason to keep a person from going on.
        return []
    return sorted({str(entry["node"]) for entry in entries if entry.get("node") and _expires(entry) > at})


def exclude(folder: RunFolder, node: str, reason: str, *, hours: int, now: float | None = None) -> None:
    """Keep the next attempts away from `node` for a while; in the very form that the batch script reads."""
    at = int(time.time() if now is None else now)
    line = {"time": at, "node": node, "reason": reason, "expires": at + hours * 3600}
    append_line(folder.excluded_file, line)


def _expires(entry: dict[str, object]) -> float:
    expires = entry.get("expires")
    return float(expires) if isinstance(expires, int | float) else 0.0
