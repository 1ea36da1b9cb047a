"""Read from the environment to which run, attempt and restart a process belongs; no other module does so."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmddp.environments.names import ATTEMPT_VARIABLE, RESTART_COUNT_VARIABLE, RUN_DIR_VARIABLE
from slurmddp.errors import SupersededError
from slurmddp.host.atomic_file import write_atomic
from slurmddp.runs.folder.late_files import read_text
from slurmddp.runs.folder.layout import RunFolder


@dataclass(frozen=True)
class RunContext:
    """The run folder, attempt and restart count of a process, from the variables that its agent has set."""

    folder: RunFolder | None = None
    """The run folder; None outside a job of slurmddp."""
    attempt: int = 0
    restart_count: int = 0
    """How often the ranks of the attempt restarted in place."""
    by_agent: bool = False
    """Whether an agent forked this process as a rank."""

    @classmethod
    def read(cls, environ: Mapping[str, str], folder: RunFolder | None = None) -> RunContext:
        """Return the context of a process from its variables; `folder` replaces the folder that they name."""
        run_dir = environ.get(RUN_DIR_VARIABLE)
        attempt = environ.get(ATTEMPT_VARIABLE, "")
        restarts = environ.get(RESTART_COUNT_VARIABLE)

        has_attempt = attempt.isdecimal()
        if folder is None and run_dir and has_attempt:
            folder = RunFolder(run_dir)
        return cls(
            folder=folder,
            attempt=int(attempt) if has_attempt else 0,
            restart_count=int(restarts or 0),
            by_agent=restarts is not None,
        )

    @property
    def is_superseded(self) -> bool:
        """Whether a later attempt of the run has started."""
        return self.folder is not None and self.folder.is_superseded(self.attempt)

    def refuse_superseded(self) -> None:
        """Raise SupersededError if a later attempt of the run has started."""
        if self.folder is not None and self.is_superseded:
            raise SupersededError(
                f"Attempt {self.attempt} of {self.folder.name} still runs, but a later attempt has started: "
                "this attempt stops now and writes nothing more.",
                hint="SLURM lost contact with a node of this attempt, or the run was started a second time.",
            )

    def keeps(self, root: Path) -> bool:
        """Return whether the folder `root` is the run's own folder of checkpoints."""
        if self.folder is None:
            return False
        return os.path.realpath(root) == os.path.realpath(self.folder.checkpoints_dir)

    def add_event(self, event: str, **facts: object) -> None:
        """Add an event of this attempt to `attempts.jsonl`; do nothing outside a run, or if superseded."""
        if self.folder is not None and not self.is_superseded:
            self.folder.add_event(event, attempt=self.attempt, **facts)

    def publish_port(self, identity: str, port: int) -> bool:
        """Write a port to a file, where `published_ports` finds it; return whether this was possible.

        A process needs this only if other programs hold all ports that are derived from the launch id.

        Args:
            identity: the id of the launch, with the purpose of the port.
            port: the port on which this process listens.
        """
        path = self._port_file(identity)
        if path is None:
            return False

        try:
            write_atomic(path, f"{port}\n")
        except OSError:
            return False
        return True

    def published_ports(self, identity: str) -> list[int]:
        """Return a list with the port that was published for `identity`; empty if none was published."""
        path = self._port_file(identity)
        if path is None:
            return []

        # `read_text` lists the folder first: a network file system may have cached that the file does not
        # exist.
        text = read_text(path) or ""
        return [int(text)] if text.strip().isdecimal() else []

    def _port_file(self, identity: str) -> Path | None:
        if self.folder is None:
            return None
        name = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return self.folder.log_dir(self.attempt) / f"port-{name}"
