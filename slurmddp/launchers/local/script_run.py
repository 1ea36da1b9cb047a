"""Run one command as the ranks of one job on this machine, from their start to their common exit code.

The output of the ranks is relayed; lines of labelled ranks begin with `[rank 1] `. If a rank fails, the other
ranks end within two seconds, and the failure is printed.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO

from slurmddp import errors
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, GOOD_CODES
from slurmddp.host import process as linux
from slurmddp.host.signals import SignalInbox
from slurmddp.launchers.agent.grace_periods import KILL_GRACE_S, TOGETHER_S
from slurmddp.launchers.agent.worker_group import WorkerGroup
from slurmddp.launchers.coordinator import messages as msg
from slurmddp.launchers.coordinator.coordinator import Coordinator
from slurmddp.launchers.coordinator.recorder import Recorder
from slurmddp.launchers.coordinator.restart_policy import rules_of
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.failure import Failure, describe

_POLL_S = 1.0
"""Seconds between two polls while no deadline is set."""
_SHORT_POLL_S = 0.05
"""Seconds between two polls while a deadline is set."""
_TAIL_BYTES = 64 * 1024
"""The bytes of a rank's output that are kept for the report of a failure."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


class Relay:
    """Copies one output stream of one rank to an output of this process, and keeps its last bytes.

    The last bytes (`tail`) are shown if the rank fails.
    """

    def __init__(self, source: IO[bytes], target: int, prefix: str) -> None:
        self.source = source
        self.tail = b""
        self._target = target
        self._prefix = prefix.encode()
        self._line = b""
        os.set_blocking(source.fileno(), False)

    def pump(self) -> bool:
        """Copy the output that has come; return False once the rank has closed the stream."""
        with suppress(BlockingIOError):
            while chunk := os.read(self.source.fileno(), _TAIL_BYTES):
                self.tail = (self.tail + chunk)[-_TAIL_BYTES:]
                self._relay(chunk)
            return False
        return True

    def _relay(self, chunk: bytes) -> None:
        if not self._prefix:
            return self._write(chunk)

        *lines, self._line = (self._line + chunk).split(b"\n")
        # A progress bar redraws its line with carriage returns: keep only the last state of the line.
        self._line = _last_state(self._line)
        # End a line that grows beyond the limit: otherwise each chunk would copy the whole line again.
        if len(self._line) > _TAIL_BYTES:
            lines.append(self._line)
            self._line = b""
        self._write(b"".join(self._prefix + _last_state(line) + b"\n" for line in lines))

    def close(self) -> None:
        """Copy the remaining output, also a last line without a newline, and close the stream."""
        self.pump()
        if self._line:
            self._write(self._prefix + self._line + b"\n")
        self.source.close()

    def _write(self, data: bytes) -> None:
        # The reader of this process's output may have ended (EPIPE). The ranks continue.
        with suppress(OSError):
            while data:
                data = data[os.write(self._target, data) :]


def _last_state(line: bytes) -> bytes:
    """Return what a terminal shows of a line: the part after its last carriage return.

    A carriage return at the very end does not count.
    """
    return line[line.rfind(b"\r", 0, -1) + 1 :]


class ScriptWorkers(WorkerGroup):
    """Ranks that all run the same command; their output is copied to the output of this process."""

    def __init__(
        self,
        command: Sequence[str],
        ranks: Sequence[Mapping[str, str]],
        labelled: Container[int],
        stdin: int,
        folder: str | None,
        selector: selectors.BaseSelector,
    ) -> None:
        super().__init__(len(ranks))
        self._command = list(command)
        self._ranks = ranks
        self._labelled = labelled
        self._stdin = stdin
        self._folder = folder
        self._selector = selector
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        """The processes of the ranks, by pid."""
        self._relays: dict[int, list[Relay]] = {}
        """The relays of each rank, by local rank; the last relay is the relay of the error output."""

    def rank(self, local_rank: int) -> int:
        """Return the global rank of a local rank."""
        return int(self._ranks[local_rank]["RANK"])

    def _start(self, local_rank: int, order: msg.StartWorkers) -> int:
        rank = self.rank(local_rank)
        is_labelled = rank in self._labelled
        process = linux.start_bound(
            self._command,
            signal.SIGKILL,
            cwd=self._folder,
            env=self._ranks[local_rank],
            stdin=subprocess.DEVNULL if rank else self._stdin,
            stdout=subprocess.PIPE if is_labelled else None,
            stderr=subprocess.PIPE,
        )
        self._processes[process.pid] = process

        prefix = f"[rank {rank}] " if is_labelled else ""
        streams = ((process.stdout, 1), (process.stderr, 2))
        self._relays[local_rank] = [Relay(stream, target, prefix) for stream, target in streams if stream]
        for relay in self._relays[local_rank]:
            self._selector.register(relay.source, selectors.EVENT_READ, relay)
        return process.pid

    def _exit_code(self, pid: int) -> int | None:
        return self._processes[pid].poll()

    def _last_lines(self, local_rank: int) -> Callable[[], Sequence[str]]:
        error_output = self._relays[local_rank][-1]
        error_output.pump()
        return partial(capture.tail_of, error_output.tail.decode("utf-8", errors="replace"))

    def close(self, *, kill: bool) -> None:
        """Kill the ranks that still run, wait for all ranks, and copy their remaining output.

        Args:
            kill: whether to kill the processes that the ranks have started even if the rank has ended.
        """
        for pid, process in self._processes.items():
            # Signal the process group of the rank, to which workers of data loaders belong as well.
            if kill or process.poll() is None:
                linux.signal_group(pid, signal.SIGKILL)
            process.wait()

        for relay in (relay for relays in self._relays.values() for relay in relays):
            relay.close()


class _CauseRecorder(Recorder):
    """Keeps the failure that ended the run in `cause`; writes no records."""

    cause: Failure | None = None

    def failed(self, cause: Failure, restart_count: int | None = None) -> None:
        self.cause = cause


class ScriptRun:
    """Runs one command as every rank of a job, from their start to their common exit code.

    Args:
        command: the program and its arguments.
        ranks: the environment of each rank.
        labelled: the ranks whose lines begin with `[rank N]`; lines of other ranks are shown unchanged.
        stdin: the descriptor that rank 0 reads; other ranks have no standard input.
        folder: the working folder of the ranks; None: this process's folder.
    """

    def __init__(
        self,
        command: Sequence[str],
        ranks: Sequence[Mapping[str, str]],
        labelled: Container[int],
        stdin: int = subprocess.DEVNULL,
        folder: str | None = None,
    ) -> None:
        self._selector = selectors.DefaultSelector()
        self._num_devices = len(ranks)
        self._workers = ScriptWorkers(command, ranks, labelled, stdin, folder, self._selector)
        self._recorder = _CauseRecorder()
        rules = rules_of({"ranks_per_node": len(ranks), "policy": {"max_restarts_in_place": 0}}, 1)
        self._coordinator = Coordinator(rules, ["localhost"], self._recorder, time.monotonic())
        self._stopped_by: signal.Signals | None = None
        """The first signal by which a person has stopped the run."""
        self._terminate_at = math.inf
        """When ranks that outlive a failed rank get SIGTERM, on the monotonic clock."""
        self._kill_at = math.inf
        """When ranks that outlive a failed rank get SIGKILL, on the monotonic clock."""
        self._is_over = False
        """Whether the coordinator has ordered the end of the run."""

    def run(self) -> int:
        """Start all ranks, wait until they have ended, and return their common exit code.

        If a rank fails or a person stops the run, the processes that the ranks have started are killed.
        """
        try:
            with SignalInbox((*_FORWARDED, signal.SIGCHLD)) as inbox:
                self._selector.register(inbox, selectors.EVENT_READ)
                self._turn(inbox)
                while not self._is_over or self._workers:
                    self._wait()
                    self._turn(inbox)
        finally:
            self._workers.close(kill=self._recorder.cause is not None or self._stopped_by is not None)
            self._selector.close()
        return self._conclude()

    def _turn(self, inbox: SignalInbox) -> None:
        """Handle the signals that have come, the ranks that have ended and the deadlines that have passed."""
        for received in inbox.read():
            if received != signal.SIGCHLD:
                self._forward(received)
        self._reap()

        now = time.monotonic()
        self._coordinator.poll(now)
        while self._coordinator.orders:
            self._obey(self._coordinator.orders.pop(0)[1])

        if now >= self._terminate_at:
            self._workers.signal(signal.SIGTERM)
            self._terminate_at = math.inf
        if now >= self._kill_at:
            self._workers.kill()

    def _wait(self) -> None:
        """Wait for output, a signal or a deadline, and copy the output."""
        has_deadline = min(self._coordinator.next_deadline, self._terminate_at, self._kill_at) < math.inf
        for key, _ in self._selector.select(_SHORT_POLL_S if has_deadline else _POLL_S):
            if key.data is not None and not key.data.pump():
                self._selector.unregister(key.fileobj)

    def _reap(self) -> None:
        """Report to the coordinator which ranks have ended since the last call."""
        had_ranks = bool(self._workers)
        failures = self._workers.poll()
        left = tuple(self._workers.left)
        now = time.monotonic()

        # A rank that fails after a request to stop is not reported: the request has caused its end.
        if failures and self._stopped_by is None:
            report = msg.WorkersFailed(restart_count=0, left=left, failures=tuple(failures))
            self._coordinator.receive(0, report, now)
        if had_ranks and not self._workers:
            done = msg.WorkersDone(restart_count=0, left=left, code=EXIT_FINISHED)
            self._coordinator.receive(0, done, now)

    def _obey(self, order: msg.Order) -> None:
        match order:
            case msg.StartWorkers():
                self._workers.start(order)
            case msg.Fail():
                self._is_over = True
                self._terminate_at = time.monotonic() + TOGETHER_S
                self._kill_at = self._terminate_at + KILL_GRACE_S
            case msg.Leave():
                self._is_over = True

    def _forward(self, received: signal.Signals) -> None:
        """Forward a signal to the ranks; at Ctrl-C after an earlier signal, kill them."""
        if self._stopped_by is not None and received == signal.SIGINT:
            self._workers.kill()
        else:
            self._workers.signal(received)
        self._stopped_by = self._stopped_by or received

    def _conclude(self) -> int:
        """Print the failure that ended the run, if there is one; return the common exit code."""
        failure = self._recorder.cause
        if failure is not None:
            message = f"slurmddp: {describe(failure)}"
            if failure.last_lines:
                message += " Its last lines:" + "".join(f"\n    {line}" for line in failure.last_lines)
            print(message, file=sys.stderr, flush=True)

            code_of_signal = 128 + signal.Signals[failure.signal] if failure.signal else EXIT_FAILED
            return failure.exit_code or code_of_signal

        code = errors.combine_exit_codes(self._workers.codes)
        was_killed = len(self._workers.codes) < self._num_devices
        if self._stopped_by is not None and (was_killed or code not in GOOD_CODES):
            return 128 + self._stopped_by
        return code
