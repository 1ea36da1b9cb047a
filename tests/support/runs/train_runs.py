"""A cluster job and its run folder, for tests of `slurmddp train`."""

from __future__ import annotations

from pathlib import Path

from slurmddp.runs.folder.layout import RunFolder

BIG = ("+cluster=big", "nodes=3", "name=first")


def only_run(project: Path) -> RunFolder:
    (path,) = (project / "runs").iterdir()
    return RunFolder(path)
