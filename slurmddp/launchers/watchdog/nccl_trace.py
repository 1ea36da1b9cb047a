"""Let NCCL's flight recorder write the last collectives of each rank to files when the ranks hang.

torch keeps the collectives in memory. torch writes them on NCCL's time-out, which comes later than the
watchdog, or when a byte arrives in a named pipe. Until torch 2.14 NCCL's process group creates the pipe of a
rank. Since then `training/process_group/flight_recording.py` does so. `torchfrtrace` reads the files. Ranks
on gloo have no such recorder.
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
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_SETTINGS: tuple[tuple[str, str, tuple[int, int]], ...] = (
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", (2, 10)),
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", (2, 10)),
    ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT", (2, 15)),
)
"""Variables of the recorder: new name, old name, and the first torch that warns of the old name."""


class FlightRecorder:
    """Configures NCCL's flight recorder for the ranks of a node, and makes ranks write its files.

    `close` removes the named pipes.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        # The pipes are in a local folder: not every file system of logs can hold named pipes, and a rank that
        # can't create its pipe fails.
        self._pipes = Path(tempfile.mkdtemp(prefix="slurmddp-nccl-"))

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables that switch the recorder on in ranks.

        Settings for which `environ` has a value, under the new or the old name, are left out.
        """
        values = (str(ENTRIES), str(self._log_dir / "nccl-trace-rank-"), "1")
        version = _torch_version()

        variables: dict[str, str] = {}
        for (name, old_name, renamed_in), value in zip(_SETTINGS, values, strict=True):
            # Check both names: torch prefers the new one, which would override a value under the old one.
            if name in environ or old_name in environ:
                continue
            variables[name] = value
            if version < renamed_in:
                variables[old_name] = value

        if _PIPE not in environ:
            variables[_PIPE] = f"{self._pipes}/"
        return variables

    def request(self, ranks: Iterable[int]) -> None:
        """Ask ranks to write their last collectives to their files, and don't wait for them.

        A rank does so within two seconds if its NCCL threads still run.
        """
        for rank in ranks:
            # A rank may have no pipe. O_NONBLOCK: the open would block if no process reads from the pipe.
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
