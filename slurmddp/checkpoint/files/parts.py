"""Write a checkpoint from several processes: each process writes its part, and one publishes all parts.

The parts are in a hidden folder beside the checkpoints. A writer flushes its files, and then writes a small
file with their records. The publisher waits for the records of all files. So no process sends tensors.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from slurmddp.checkpoint.files.digest import FileRecord
from slurmddp.checkpoint.files.durable import sync_folder, write_small
from slurmddp.checkpoint.files.manifest import PARTS, check_size, shard_file
from slurmddp.checkpoint.files.publish import Fill, checkpoint_error
from slurmddp.checkpoint.files.retry import retried
from slurmddp.errors import CheckpointError, SlurmddpError
from slurmddp.runs.folder.owner import refuse_foreign
from slurmddp.runs.folder.run_context import RunContext

PATIENCE_S = 120.0
"""Seconds without a new byte in any part before the publisher gives up: twice the time for which NFS may show
an old size of a file."""
_POLL_S = 0.05
_MAX_POLL_S = 1.0
"""The first and the longest pause between two checks of the parts, in seconds."""
_NO_LINKS = frozenset({errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of file systems without hard links, or without hard links between folders."""

_Completed = dict[str, tuple[Path, FileRecord]]
"""Path and record of each file that a writer has completed, by name."""


@dataclass(frozen=True)
class Parts:
    """Hidden folder where several processes write the files of one checkpoint, each process one part.

    Every writer creates this object with the same values.
    """

    root: Path
    """The folder of all checkpoints."""
    name: str
    """Name of the checkpoint's folder."""
    stamp: int
    """The time of the save, in nanoseconds since the epoch; it distinguishes saves with the same name."""
    ranks: int
    """Number of ranks that have shards."""

    @property
    def folder(self) -> Path:
        """The path of the hidden folder."""
        return self.root / f"{PARTS}{self.name}-{self.stamp}"

    @property
    def files(self) -> frozenset[str]:
        """Names of the files in all parts: one file with shards for each rank."""
        return frozenset(map(shard_file, range(self.ranks)))

    def write(self, part: int, fill: Fill) -> None:
        """Write one part durably, and then the records (size and digest) of its files.

        An error is raised here, and also reported to the publisher.

        Args:
            part: the number of the part: the first rank whose shards it contains.
            fill: writes the files of the part, as for `publish`.

        Raises:
            CheckpointError: the part was not written.
            SupersededError: a later attempt of the run has started.
        """
        try:
            refuse_foreign(self.root)
            RunContext.read(os.environ).refuse_superseded()
            records = retried(partial(self._write_once, part, fill), f"Writing a part of {self.name}")
            rows = json.dumps({"files": {name: asdict(record) for name, record in records.items()}})
            retried(partial(write_small, self._records(part), rows), f"Writing a part of {self.name}")
        except OSError as error:
            problem = checkpoint_error(error, f"A part of {self.name} could not be written to {self.root}")
            self.fail(part, problem)
            raise problem from error
        except Exception as error:
            self.fail(part, error)
            raise

    def _write_once(self, part: int, fill: Fill) -> Mapping[str, FileRecord]:
        folder = self._part(part)
        # An earlier call that failed may have left files, which `fill` does not expect.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

        records = fill(folder)
        sync_folder(folder)
        return records

    def fail(self, part: int, error: Exception) -> None:
        """Write `error` where the publisher expects the records of `part`, so that it stops waiting."""
        text = error.message if isinstance(error, SlurmddpError) else f"{type(error).__name__}: {error}"
        # If the disk fails here too, the publisher gives up after PATIENCE_S.
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_small(self._records(part), json.dumps({"error": text}))

    def collect(self, names: Collection[str], target: Path) -> dict[str, FileRecord]:
        """Wait until other writers have completed the files `names`, and add them to the folder `target`.

        Files are added by hard links if the file system has them. The parts then stay complete, so the call
        can be repeated. Otherwise the files are moved.

        Args:
            names: the names of the files.
            target: the folder of the checkpoint.

        Returns:
            The record (size and digest) of each file by name.

        Raises:
            CheckpointError: a writer has failed, or no part has grown for PATIENCE_S seconds.
        """
        completed = self._wait_for(set(names))
        for name in names:
            source, record = completed[name]
            # Open the file first: a network file system may show an old size until the file is opened.
            with source.open("rb"):
                check_size(source, record)
            _take(source, target / name)

        return {name: completed[name][1] for name in names}

    def _wait_for(self, names: set[str]) -> _Completed:
        """Wait until the files `names` are completed, and return all completed files.

        Raises:
            CheckpointError: a writer has failed, or no part has grown for PATIENCE_S seconds.
        """
        completed: _Completed = {}
        size = -1
        give_up_at = 0.0
        pause_s = _POLL_S
        while True:
            self._read_records(completed)
            missing = names - completed.keys()
            if not missing:
                return completed

            size_before = size
            size = self._size()
            if size != size_before:
                give_up_at = time.monotonic() + PATIENCE_S
            elif time.monotonic() > give_up_at:
                raise CheckpointError(
                    f"{min(missing)} of {self.name} was not completed: its writer has ended, or its node is "
                    "down.",
                    hint="See the logs of the other nodes (node-N.log). All nodes must share the folder "
                    f"{self.root}.",
                )

            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)

    def _read_records(self, completed: _Completed) -> None:
        """Add to `completed` the files that writers have completed since the last call.

        Raises:
            CheckpointError: a writer has reported an error instead of records.
        """
        known = {path.parent.name for path, _ in completed.values()}
        for path in self.folder.glob("[!.]*.json"):
            if path.stem in known:
                continue

            rows = json.loads(path.read_text(encoding="utf-8"))
            if "error" in rows:
                # Delete the report: a retry of the same save must not find this error again.
                path.unlink()
                raise CheckpointError(f"Another node did not write its part of {self.name}: {rows['error']}")
            for name, row in rows["files"].items():
                completed[name] = (path.with_suffix("") / name, FileRecord(**row))

    def _size(self) -> int:
        """Return the number of bytes in all parts."""
        total = 0
        for path in self.folder.rglob("*"):
            # A writer may delete its part at this moment, to write it again.
            with suppress(FileNotFoundError):
                total += path.stat().st_size

        return total

    def sweep(self) -> None:
        """Delete this folder of parts, and the folders of earlier saves, which nobody publishes any more."""
        for folder in self.root.glob(f"{PARTS}*"):
            stamp = folder.name.rpartition("-")[2]
            if stamp.isdecimal() and int(stamp) <= self.stamp:
                shutil.rmtree(folder, ignore_errors=True)

    def _part(self, part: int) -> Path:
        return self.folder / f"rank-{part:05d}"

    def _records(self, part: int) -> Path:
        return self.folder / f"rank-{part:05d}.json"


def _take(source: Path, target: Path) -> None:
    """Link `source` to the new name `target`, or move it there if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        source.rename(target)
