"""NCCL's flight recorder: the last collectives of each rank, written to files when the ranks hang.

torch keeps the collectives in memory. It writes them on NCCL's time-out, which comes later than the watchdog,
or when a byte arrives in a named pipe that each rank makes. `torchfrtrace` reads the files. Ranks on gloo
have no such recorder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

ENTRIES = 2000
"""Collectives that each rank keeps."""
_RENAMED_IN = (2, 10)
"""From this version on torch knows the new names of the variables, and each rank warns of the old ones."""


class FlightRecorder:
    """The files and pipes of one node's ranks; `close` removes the pipes."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        # Not beside the logs: a rank that can't make its pipe ends, and some file systems have no pipes.
        self._pipes = Path(tempfile.mkdtemp(prefix="slurmddp-nccl-"))

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that switch the recorder on in ranks, less those that `environ` has set."""
        wanted = {
            ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): str(ENTRIES),
            ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): str(
                self._log_dir / "nccl-trace-rank-"
            ),
            ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
            ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",): f"{self._pipes}/",
        }
        known = 1 if _torch_version() >= _RENAMED_IN else 2
        # torch prefers the new name of a variable. Set beside a person's old name, it would override it.
        free = {names: value for names, value in wanted.items() if environ.keys().isdisjoint(names)}
        return {name: value for names, value in free.items() for name in names[:known]}

    def request(self, ranks: Iterable[int]) -> None:
        """Ask ranks to write their files; a rank whose NCCL threads still run takes a second or two."""
        for rank in ranks:
            with suppress(OSError):  # There is no pipe, or no process reads it.
                pipe = os.open(self._pipes / f"{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
                with open(pipe, "wb", buffering=0) as stream:
                    stream.write(b"1\n")

    def close(self) -> None:
        shutil.rmtree(self._pipes, ignore_errors=True)


def _torch_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in metadata.version("torch").split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):
        return ()
