"""Find in srun's reports an agent that SLURM could not start, and record it as the failure of the attempt.

Without this agent the ranks can't start. srun keeps running after such a report, and the other agents would
wait for the missing agent until `policy.join_timeout_s`. The node itself may be healthy, so the next attempt
may get it again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import NamedTuple

from slurmddp.batch.attempt import Attempt, log_write_error
from slurmddp.runs.folder.late_files import create_new, read_text

_REPORT = re.compile(
    r"^srun: error: (?:Task launch for \S+ failed on node (?P<host>\S+)|task (?P<node>\d+) launch failed): "
    r"(?P<why>.+)$",
    re.MULTILINE,
)


class LaunchFailure(NamedTuple):
    """An agent that SLURM could not start."""

    node: int
    host: str
    reason: str
    """The reason as srun reports it."""


def launch_failure(attempt: Attempt, hosts: Sequence[str]) -> LaunchFailure | None:
    """Return the first agent that SLURM could not start; None if SLURM started all.

    An agent counts as not started if srun reports its failed launch and the agent has no log. The report
    alone is not enough: it may come from an srun in the setup lines.
    """
    # With spare nodes or `elastic`, the other agents start without the missing agent: nothing has failed.
    if attempt.settings.tolerates_node_loss:
        return None

    for report in _REPORT.finditer(read_text(attempt.folder.batch_log(attempt.number)) or ""):
        node = _node_of(report, hosts)
        log = attempt.folder.node_log(attempt.number, node)
        if node < len(hosts) and read_text(log) is None:
            return LaunchFailure(node, hosts[node], report["why"])
    return None


def _node_of(report: re.Match[str], hosts: Sequence[str]) -> int:
    """Return the index of the node that srun reports, by the host or by the task: one task runs on each node.

    The index is `len(hosts)` if the node is not among `hosts`.
    """
    if report["node"]:
        return int(report["node"])
    return [*hosts, report["host"]].index(report["host"])


def record(attempt: Attempt, failure: LaunchFailure) -> None:
    """Write the failure to `failure.json` and add the event `rank_failed`, unless the file exists already."""
    facts = {
        "rank": None,
        "node_rank": failure.node,
        "host": failure.host,
        "exit_code": None,
        "signal": None,
        "kind": "not_started",
        "reason": f"was not started by SLURM: {failure.reason}",
    }
    path = attempt.folder.failure_file(attempt.number)
    with log_write_error("The failed launch", attempt.log):
        try:
            descriptor = create_new(path, 0o644)
        except FileExistsError:
            return

        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(json.dumps({**facts, "time": round(time.time(), 3)}) + "\n")
        attempt.folder.add_event("rank_failed", attempt=attempt.number, restart_count=0, **facts)
