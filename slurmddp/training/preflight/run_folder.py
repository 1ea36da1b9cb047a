"""Measure the file system of the run folder from two nodes, and report which needs it does not meet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import RankFailure
from slurmddp.runs.folder.file_system import BY_LISTING, FileSystem, shortfalls
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.measure_files import measure
from slurmddp.training.preflight.checks import NOBODY, RUN, NodeFault
from slurmddp.training.process_group.signed_store import SignedStore

_ANSWER_S = 20.0
"""Seconds that a node waits for the other node's values, in addition to the time of the measurement."""
_HOSTS = 2


class _TwoNodes:
    """The connection of the first ranks of two nodes, over rank 0's store."""

    count = _HOSTS

    def __init__(self, info: RankInfo, store: SignedStore, timeout_s: float) -> None:
        self.index = info.node_rank
        self._store = store
        self._timeout_s = timeout_s
        self._step = 0

    def gather(self, value: Any) -> list[Any]:
        """Return a JSON value of each of the two ranks; raise RankFailure if one does not come in time."""
        key = f"slurmddp/preflight/files/{self._step}"
        self._step += 1
        self._store.set(f"{key}/{self.index}", json.dumps(value))
        answers = self._store.wait([f"{key}/{index}" for index in range(self.count)], self._timeout_s)

        values = [json.loads(answer) for answer in answers if answer is not None]
        if len(values) < self.count:
            raise RankFailure(
                f"a node did not take the next step within {self._timeout_s:g} s", hint="Its log may say why."
            )
        return values


def takes_part(info: RankInfo) -> bool:
    """Return whether this rank measures the run folder, as the first ranks of the first two nodes do."""
    return info.nodes >= _HOSTS and info.node_rank < _HOSTS and info.local_rank == 0


def measure_run_folder(
    info: RankInfo, store: SignedStore, folder: RunFolder, names: Sequence[str], limit_s: float
) -> FileSystem:
    """Measure the file system of the run folder together with the rank of the other node.

    Args:
        info: this rank.
        store: rank 0's store.
        folder: the run folder.
        names: the names of all nodes, by node rank.
        limit_s: seconds to wait for a change of the other node.

    Raises:
        SlurmddpError: a node can't use the folder, or has left.
    """
    hosts = _TwoNodes(info, store, limit_s + _ANSWER_S)
    return measure(folder.path, hosts, name=names[info.node_rank], limit_s=limit_s, looks=BY_LISTING)


def findings(files: FileSystem) -> Iterator[NodeFault]:
    """Yield a finding for each need of slurmddp that the file system does not meet."""
    for shortfall in shortfalls(files):
        fault = RUN if shortfall.is_fault else NOBODY
        yield NodeFault(node="run folder", text=shortfall.text, hint=shortfall.remedy, fault=fault)
