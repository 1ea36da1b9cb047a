"""Call a function as every rank, in separate processes, and return rank 0's result.

`Distributon.launch(function)` calls this module, also from a notebook. The ranks are new processes: a fork of
a process in which torch has used its threads would hang. The call is pickled by value into a temporary folder
of the user, so that functions of a notebook work.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from slurmddp.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    ConfigError,
    SlurmddpError,
    StoppedAtCheckpoint,
)
from slurmddp.launchers.local.launch import run_ranks
from slurmddp.launchers.local.launcher import Launcher

Result = TypeVar("Result")

_INTERRUPTED = 128 + signal.SIGINT
_ENDED = (128 + signal.SIGTERM, 128 + signal.SIGUSR2)
_PATH = "path.json"
_CALL = "call.pkl"
_RESULT = "result.pkl"
_ERROR = "error-"


def call_on_ranks(call: Callable[[], Result], num_devices: int, launcher: Launcher) -> Result:
    """Call `call` in `num_devices` new processes, the ranks 0..N-1 of one job; return rank 0's result.

    Raises:
        ConfigError: this is not the main thread, or a value that the function uses can't be pickled.
        SlurmddpError: a rank has failed; the message holds its error, the hint its traceback.
        StoppedAtCheckpoint: the ranks were stopped at a checkpoint.
        KeyboardInterrupt: Ctrl-C has ended the ranks.
        SystemExit: SIGTERM or SIGUSR2 has ended the ranks; the code is 128 plus the signal's number.
    """
    import cloudpickle  # type: ignore[import-untyped]

    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "launch() was called in a thread, which gets no signals.", hint="Call it in the main thread."
        )

    with tempfile.TemporaryDirectory(prefix="slurmddp-call-") as name:
        folder = Path(name)
        (folder / _PATH).write_text(json.dumps(sys.path))
        try:
            (folder / _CALL).write_bytes(cloudpickle.dumps(call))
        except Exception as error:
            raise ConfigError(
                f"The function can't be pickled to send it to the ranks: {type(error).__name__}: {error}.",
                hint="Create files, locks and similar objects inside the function, not outside.",
            ) from error

        code = run_ranks([sys.executable, "-m", __name__, name], None, num_devices, launcher)
        if code == EXIT_FINISHED:
            result: Result = cloudpickle.loads((folder / _RESULT).read_bytes())
            return result
        raise _error_of(folder, code)


def main(folder: Path) -> int:
    """As one rank, call the function that is pickled in `folder`; return the exit code.

    Rank 0 writes the result to `folder`. A rank that fails writes its error there.
    """
    sys.path[:] = json.loads((folder / _PATH).read_text())
    import cloudpickle

    rank = int(os.environ["RANK"])
    try:
        result = cloudpickle.loads((folder / _CALL).read_bytes())()
        if rank == 0:
            (folder / _RESULT).write_bytes(cloudpickle.dumps(result))
    except StoppedAtCheckpoint:
        return EXIT_STOPPED
    except Exception as error:
        _cut_frames(error)
        text = "".join(traceback.format_exception(error))
        report = {"error": f"{type(error).__name__}: {error}", "traceback": text}
        (folder / f"{_ERROR}{rank}").write_text(json.dumps(report))
        print(text, end="", file=sys.stderr, flush=True)
        return EXIT_FAILED
    return EXIT_FINISHED


def _cut_frames(error: BaseException) -> None:
    """Remove slurmddp's frames from the start of the traceback, unless no other frames are left."""
    starters = (__file__, str(Path(__file__).parents[2] / "training" / "distributon.py"))
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in starters:
        frames = frames.tb_next
    error.__traceback__ = frames or error.__traceback__


def _error_of(folder: Path, code: int) -> BaseException:
    """Return the exception to raise for a non-zero exit code of the ranks.

    After a stop it is StoppedAtCheckpoint, KeyboardInterrupt or SystemExit. After a failure it contains the
    first error that a rank has written to `folder`.
    """
    if code == EXIT_STOPPED:
        return StoppedAtCheckpoint("The training was stopped.", hint="Call it again to resume.")
    if code == _INTERRUPTED:
        return KeyboardInterrupt()
    if code in _ENDED:
        return SystemExit(code)

    # Use the first error: the other ranks probably fail because they lost that rank.
    paths = sorted(folder.glob(f"{_ERROR}*"), key=lambda path: path.stat().st_mtime_ns)
    if not paths:
        return SlurmddpError(
            f"The ranks ended with exit code {code}.", hint="The last lines of their output are shown above."
        )

    report: dict[str, Any] = json.loads(paths[0].read_text())
    rank = paths[0].name.removeprefix(_ERROR)
    return SlurmddpError(f"Rank {rank} failed: {report['error']}", hint=report["traceback"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
