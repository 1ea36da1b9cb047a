"""Nodes that failed: each run folder lists the nodes that its run avoids, and an account's runs share them.

Batch step and preflight note failed nodes in the run folder. `share` copies these notes to the file
`$XDG_STATE_HOME/slurmddp/failed_nodes.jsonl`. `adopt` copies the notes of other runs on the same cluster into
the run folder. A person may delete a line of the shared file; later runs then use the node again.
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
"""How a node was found to have failed: it was lost, or a test of the preflight found it unhealthy."""
_LOST_S = 3600
"""Seconds for which other runs avoid a node that was lost: a cut link may be back a minute later."""


def excluded_nodes(folder: RunFolder, now: float | None = None, *, since: float = 0.0) -> list[str]:
    """Return the nodes whose exclusion has not expired, sorted; empty if the file is damaged.

    Args:
        folder: of the run.
        now: the time at which the exclusion must still hold; 0 for all nodes that ever failed.
        since: leaves out nodes that were recorded before this time.
    """
    at = time.time() if now is None else now
    held = _held(folder.excluded_file, at)
    return sorted({str(one["node"]) for one in held if _time(one, "time") >= since})


def exclude(
    folder: RunFolder,
    node: str,
    reason: str,
    *,
    hours: int,
    found_by: FoundBy = "loss",
    now: float | None = None,
) -> None:
    """Exclude `node` from the attempts of the next `hours`."""
    at = int(time.time() if now is None else now)
    line = {"time": at, "node": node, "reason": reason, "found_by": found_by, "expires": at + hours * 3600}
    append_line(folder.excluded_file, line)


def shared_file() -> Path:
    """Return the file in which the runs of this account share the nodes that failed."""
    return state_dir() / "failed_nodes.jsonl"


def shared_nodes(cluster: str = "") -> list[dict[str, Any]]:
    """Return the shared notes that have not expired, of one SLURM cluster or of all."""
    return [one for one in _held(shared_file(), time.time()) if cluster in ("", one.get("cluster"))]


def share(folder: RunFolder, cluster: str, *, since: float) -> None:
    """Add the run's own notes since `since` to the shared file, each once; raises OSError.

    A node that a test of the preflight found unhealthy is avoided by other runs as long as by this one, any
    other for an hour: SLURM keeps a node that is down from all jobs by itself.
    """
    known = {_key(note) for note in shared_nodes(cluster)}
    for own in _held(folder.excluded_file, time.time()):
        note = {**own, "cluster": cluster, "run": folder.name}
        if own.get("found_by") != "preflight":
            note["expires"] = min(own["expires"], _time(own, "time") + _LOST_S)
        if "run" not in own and _time(own, "time") >= since and _key(note) not in known:
            shared_file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            append_line(shared_file(), note)


def adopt(folder: RunFolder, cluster: str) -> None:
    """Add the notes of other runs on the same cluster to the list of this run, each once; raises OSError."""
    known = {_key(one) for one in _held(folder.excluded_file, time.time())}
    for note in shared_nodes(cluster):
        if _key(note) not in known:
            append_line(folder.excluded_file, note)


def _held(path: Path, at: float) -> list[dict[str, Any]]:
    """Return the notes that hold at a time; none if the file can't be read, because notes are only advice."""
    if not is_there(path):
        return []
    try:
        return [one for one in read_lines(path) if one.get("node") and _time(one, "expires") > at]
    except (SlurmddpError, OSError):
        return []


def _key(entry: dict[str, Any]) -> tuple[str, float]:
    return str(entry["node"]), _time(entry, "time")


def _time(entry: dict[str, object], key: str) -> float:
    found = entry.get(key)
    return float(found) if isinstance(found, (int, float)) else 0.0
