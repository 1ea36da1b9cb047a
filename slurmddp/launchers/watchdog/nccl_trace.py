"""Let NCCL's flight recorder write the last collectives of each rank to files when the ranks hang.

torch keeps the collectives in memory. It writes them on NCCL's time-out, which comes later than the watchdog,
or when a byte arrives in a named pipe, which each rank creates. `torchfrtrace` reads the files. Ranks on gloo
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
"""The number of collectives that each rank keeps."""
_RENAMED_IN = (2, 10)
"""From this version on torch knows the new names of the variables, and each rank warns of the old ones."""


class FlightRecorder:
    """The flight recorder's files and pipes of a node's ranks; `close` removes the pipes."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        # Some file systems, such as the logs' file system, have no pipes, and a rank that can't create its
        # pipe ends.
        self._pipes = Path(tempfile.mkdtemp(prefix="slurmddp-nccl-"))

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that switch the recorder on in ranks, except those that `environ` contains."""
        prefix = str(self._log_dir / "nccl-trace-rank-")
        settings = {
            ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): str(ENTRIES),
            ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): prefix,
            ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
            ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",): f"{self._pipes}/",
        }

        variables: dict[str, str] = {}
        known = 1 if _torch_version() >= _RENAMED_IN else 2
        for names, value in settings.items():
            # torch prefers the new name of a variable, which would override the user's value of the old name.
            if environ.keys().isdisjoint(names):
                variables |= dict.fromkeys(names[:known], value)

        return variables

    def request(self, ranks: Iterable[int]) -> None:
        """Ask ranks to write their files; a rank whose NCCL threads still run takes a second or two."""
        for rank in ranks:
            # There may be no pipe. Without O_NONBLOCK, a pipe that no process reads would block the agent.
            with suppress(OSError):
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
