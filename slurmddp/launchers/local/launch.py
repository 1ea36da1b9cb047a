"""Runs a person's own script once per device: the command of this very process, again, N times.

`Distributon.launch()` ends here in a plain `python script.py`. The first process trains nothing; it hands out
ranks, watches, and relays output: rank 0's as it is, other ranks' lines as `[rank 1] ...`. The ranks have no
standard input. If one fails, the others end within two seconds and the failure is told.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from slurmddp.batch import outcome
from slurmddp.environments.names import LAUNCH_ID_VARIABLE, LAUNCHER_VARIABLE
from slurmddp.errors import EXIT_FINISHED, EXIT_STOPPED, ConfigError
from slurmddp.host import process as linux
from slurmddp.host.oom import OomWatch
from slurmddp.host.signals import SignalInbox
from slurmddp.runs.failures import capture

_KILL_GRACE_S = 1.0
_CAUSE_WAIT_S = 0.3
_TAIL_BYTES = 64 * 1024
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


def launch_script(num_devices: int) -> NoReturn:
    """Run this program `num_devices` times as the ranks 0..N-1 of one job, then exit with their code."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "launch() was called in a thread, which gets no signals.",
            hint="Call it in the main thread, before anything else is set up.",
        )
    main = sys.modules["__main__"]
    command = rerun_command(sys.orig_argv, sys.argv[0], getattr(main, "__file__", None), hasattr(sys, "ps1"))
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(ScriptRun(command, num_devices).run())


def rerun_command(
    orig_argv: Sequence[str], argv0: str, main_file: str | None, interactive: bool
) -> list[str]:
    """Return the command that starts the running program again, arguments and interpreter options intact."""
    if interactive or (main_file is None and "-c" not in orig_argv):
        raise ConfigError(
            "launch() has to start this program again, but it was typed into an interpreter or a notebook.",
            hint="Put it into a file and run that, or use num_devices=1 here.",
        )
    command = [sys.executable, *orig_argv[1:]]
    # A script given by a relative path is not found any more once the program has changed its folder.
    if main_file is not None and argv0 in command and not Path(argv0).exists():
        command[command.index(argv0)] = main_file
    return command


def rank_environment(
    environ: Mapping[str, str], rank: int, num_devices: int, launch_id: str
) -> dict[str, str]:
    """Return the environment of one rank; `MASTER_*` of the surrounding shell would lead it astray."""
    values = {name: value for name, value in environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    if rank > 0:
        values.setdefault("PYTHONUNBUFFERED", "1")  # Into a pipe, Python would write by the block.
    return values | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_devices),
        "LOCAL_WORLD_SIZE": str(num_devices),
        "NODE_RANK": "0",
        LAUNCHER_VARIABLE: "local",
        LAUNCH_ID_VARIABLE: launch_id,
    }


class Relay:
    """One output stream of one rank: passed on as it comes, its end kept for a failure's report."""

    def __init__(self, source: IO[bytes], target: int, prefix: str) -> None:
        self.source = source
        self.tail = b""
        self._target = target
        self._prefix = prefix.encode()
        self._line = b""
        os.set_blocking(source.fileno(), False)

    def pump(self) -> bool:
        """Pass on what has come; False once the rank has closed the stream."""
        with suppress(BlockingIOError):
            while chunk := os.read(self.source.fileno(), _TAIL_BYTES):
                self.tail = (self.tail + chunk)[-_TAIL_BYTES:]
                self._pass_on(chunk)
            return False
        return True

    def _pass_on(self, chunk: bytes) -> None:
        if not self._prefix:
            return self._write(chunk)
        *lines, self._line = (self._line + chunk).split(b"\n")
        # Of a progress bar that redraws its line, only what stood last is worth a line here.
        self._line = self._line[self._line.rfind(b"\r", 0, -1) + 1 :]
        self._write(b"".join(self._prefix + line[line.rfind(b"\r", 0, -1) + 1 :] + b"\n" for line in lines))

    def close(self) -> None:
        """Pass on a last line that has no end."""
        self.pump()
        if self._line:
            self._write(self._prefix + self._line + b"\n")
        self.source.close()

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # Whoever reads the output may be gone; the training goes on.
            while data:
                data = data[os.write(self._target, data) :]


class ScriptRun:
    """The ranks of one `launch()`, from their start to the exit code of all."""

    def __init__(self, command: Sequence[str], num_devices: int) -> None:
        self._command = list(command)
        self._num_devices = num_devices
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._relays: dict[int, list[Relay]] = {}
        self._selector = selectors.DefaultSelector()
        self._oom = OomWatch()
        self._stopped_by: signal.Signals | None = None
        self._failures: dict[int, capture.Failure] = {}
        self._end_at: float | None = None
        self._kill_at: float | None = None

    def run(self) -> int:
        """Start all ranks and return their common exit code; nothing that they started is left."""
        try:
            with SignalInbox((*_FORWARDED, signal.SIGCHLD)) as inbox:
                self._selector.register(inbox, selectors.EVENT_READ)
                launch_id = secrets.token_hex(8)
                for rank in range(self._num_devices):
                    self._start(rank, launch_id)
                while any(rank.poll() is None for rank in self._ranks):
                    self._turn(inbox)
                self._note_failures()
        finally:
            self._leave_nothing()
        return self._conclude()

    def _start(self, rank: int, launch_id: str) -> None:
        process = linux.start_bound(
            self._command,
            signal.SIGKILL,
            env=rank_environment(os.environ, rank, self._num_devices, launch_id),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank else None,
            stderr=subprocess.PIPE,
        )
        prefix = f"[rank {rank}] " if rank else ""
        streams = ((process.stdout, 1), (process.stderr, 2))
        self._ranks.append(process)
        self._relays[rank] = [Relay(stream, target, prefix) for stream, target in streams if stream]
        for relay in self._relays[rank]:
            self._selector.register(relay.source, selectors.EVENT_READ, relay)

    def _turn(self, inbox: SignalInbox) -> None:
        """Wait for whatever comes first, output, a signal or an end, and deal with it."""
        for key, _ in self._selector.select(0.05 if self._failures else 1.0):
            if key.data is not None and not key.data.pump():
                self._selector.unregister(key.fileobj)
        for received in inbox.read():
            if received != signal.SIGCHLD:
                self._forward(received)
        if self._stopped_by is None:
            self._note_failures()
        if self._failures:
            self._end_the_others()

    def _forward(self, received: signal.Signals) -> None:
        again = self._stopped_by is not None and received == signal.SIGINT
        self._stopped_by = self._stopped_by or received
        for rank in self._ranks:
            if rank.poll() is None:
                if again:
                    linux.signal_group(rank.pid, signal.SIGKILL)
                else:
                    rank.send_signal(received)

    def _note_failures(self) -> None:
        """Keep the failures that came by themselves, not those of ranks that were told to end."""
        if self._kill_at is not None or self._stopped_by is not None:
            return
        for number, rank in enumerate(self._ranks):
            code = rank.poll()
            if code not in (None, EXIT_FINISHED, EXIT_STOPPED) and number not in self._failures:
                self._failures[number] = self._failure_of(number, code or 1)

    def _failure_of(self, rank: int, returncode: int) -> capture.Failure:
        errors = self._relays[rank][-1]
        errors.pump()
        lines = capture.tail_of(errors.tail.decode("utf-8", errors="replace"))
        oom = self._oom.verdict()
        return capture.here(returncode, node_rank=0, rank=rank, local_rank=rank, lines=lines, oom=oom)

    def _end_the_others(self) -> None:
        """End the ranks that outlive a failed one, once its cause is likely known."""
        now = time.monotonic()
        self._end_at = self._end_at or now + _CAUSE_WAIT_S
        if self._kill_at is None:
            cause = capture.likely_first(self._failures.values())
            if capture.is_consequence(cause) and now < self._end_at:
                return
            self._kill_at = now + _KILL_GRACE_S
            self._signal_groups(signal.SIGTERM)
        elif now > self._kill_at:
            self._signal_groups(signal.SIGKILL)

    def _signal_groups(self, sent: signal.Signals) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                linux.signal_group(rank.pid, sent)

    def _leave_nothing(self) -> None:
        for number, rank in enumerate(self._ranks):
            if rank.poll() is None or self._failures or self._stopped_by is not None:
                linux.signal_group(rank.pid, signal.SIGKILL)  # Data loader workers are in the group as well.
            rank.wait()
            for relay in self._relays[number]:
                relay.close()
        self._selector.close()

    def _conclude(self) -> int:
        if self._failures:
            found = capture.likely_first(self._failures.values())
            lines = "".join(f"\n    {line}" for line in found.last_lines)
            said = " Its last lines:" + lines if lines else ""
            print(f"slurmddp: {capture.describe(found)}{said}", file=sys.stderr, flush=True)
            return found.exit_code or capture.node_code(found)
        code = outcome.combine(rank.returncode for rank in self._ranks)
        if self._stopped_by is not None and code not in (EXIT_FINISHED, EXIT_STOPPED):
            return 128 + self._stopped_by
        return code
