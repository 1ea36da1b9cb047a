"""Exclude nodes that failed: each run lists the nodes that it avoids, and the runs of an account share them.

Batch step and preflight record failed nodes in the run folder. `share` copies these records to the file
`$XDG_STATE_HOME/slurmddp/failed_nodes.jsonl`. `adopt` copies the records of other runs on the same cluster
into the run folder. A person may delete a line of the shared file; later runs then use the node again.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

from slurmddp.errors import SlurmddpError
from slurmddp.runs.folder.jsonl import append_line, read_lines
from slurmddp.runs.folder.late_files import is_there
from slurmddp.runs.folder.layout import RunFolder, state_dir

FoundBy = Literal["loss", "preflight"]
"""How slurmddp noticed that a node failed: its agent was lost, or a check of the preflight failed."""
_LOST_S = 3600
"""Seconds for which other runs avoid a node that was lost: a link that was cut may be back a minute later."""


def excluded_nodes(folder: RunFolder, now: float | None = None, *, since: float = 0.0) -> list[str]:
    """Return the nodes whose exclusion from the run has not expired, sorted; empty if the file can't be read.

    Args:
        folder: the run folder.
        now: exclusions that expire by this time are left out; None means the current time. With 0, all nodes
            that ever failed are returned.
        since: exclusions that were recorded before this time are left out.
    """
    at = time.time() if now is None else now
    exclusions = _unexpired(folder.excluded_file, at)
    return sorted({str(exclusion["node"]) for exclusion in exclusions if _time(exclusion, "time") >= since})


def exclude(
    folder: RunFolder,
    node: str,
    reason: str,
    *,
    hours: int,
    found_by: FoundBy = "loss",
    now: float | None = None,
) -> None:
    """Append a record to the run's list that excludes `node` from its attempts for `hours` hours."""
    at = int(time.time() if now is None else now)
    line = {"time": at, "node": node, "reason": reason, "found_by": found_by, "expires": at + hours * 3600}
    append_line(folder.excluded_file, line)


def shared_file() -> Path:
    """Return the path of the file with the failed nodes that all runs of this account avoid."""
    return state_dir() / "failed_nodes.jsonl"


def shared_nodes(cluster: str = "") -> list[dict[str, Any]]:
    """Return the records of the shared file that have not expired: of one SLURM cluster, or of all for ""."""
    exclusions = _unexpired(shared_file(), time.time())
    return [exclusion for exclusion in exclusions if cluster in ("", exclusion.get("cluster"))]


def share(folder: RunFolder, cluster: str, *, since: float) -> None:
    """Add the exclusions that this run has recorded since the time `since` to the shared file.

    Exclusions that the shared file already has are not added again.

    Raises:
        OSError: the shared file can't be written.
    """
    known = {_key(exclusion) for exclusion in shared_nodes(cluster)}
    for exclusion in _unexpired(folder.excluded_file, time.time()):
        is_adopted = "run" in exclusion
        if is_adopted or _time(exclusion, "time") < since:
            continue

        shared = {**exclusion, "cluster": cluster, "run": folder.name}
        # A lost node is shared only for _LOST_S: SLURM itself keeps jobs off a node that is down. SLURM does
        # not know about a node that failed the preflight, so the exclusion of such a node keeps its full
        # time.
        if exclusion.get("found_by") != "preflight":
            shared["expires"] = min(exclusion["expires"], _time(exclusion, "time") + _LOST_S)
        if _key(shared) not in known:
            shared_file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            append_line(shared_file(), shared)


def adopt(folder: RunFolder, cluster: str) -> None:
    """Add the shared exclusions of the same cluster to this run's list, unless the list already has them.

    Raises:
        OSError: the list can't be written.
    """
    known = {_key(exclusion) for exclusion in _unexpired(folder.excluded_file, time.time())}
    for exclusion in shared_nodes(cluster):
        if _key(exclusion) not in known:
            append_line(folder.excluded_file, exclusion)


def _unexpired(path: Path, at: float) -> list[dict[str, Any]]:
    """Return the records in a file that expire after the time `at`; empty if the file can't be read."""
    # A listing makes a network file system show a file that another host has just written.
    if not is_there(path):
        return []

    try:
        lines = list(read_lines(path))
    except (SlurmddpError, OSError):
        # An exclusion is advice; a damaged list must not end a run.
        return []
    return [line for line in lines if line.get("node") and _time(line, "expires") > at]


def _key(exclusion: dict[str, Any]) -> tuple[str, float]:
    return str(exclusion["node"]), _time(exclusion, "time")


def _time(exclusion: dict[str, object], key: str) -> float:
    seconds = exclusion.get(key)
    return float(seconds) if isinstance(seconds, (int, float)) else 0.0
