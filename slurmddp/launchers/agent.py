"""One process per node that imports torch once, forks the node's ranks, and watches them.

    python -m slurmddp.launchers.agent RUN_DIR

The batch script starts it through srun, the local launcher as a plain process, submitit as its task. It
learns its place from the environment and everything else from the run folder. It never touches CUDA (a forked
rank could not use it any more) and starts no thread. Its exit code is its ranks' (see `outcome.combine`), and
0 once a later attempt has begun; `exit-node-N` always tells the ranks'.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurmddp.environments.detect import detect, require
from slurmddp.environments.limits import leave_at, read_limits
from slurmddp.environments.present import IMPORTS_VARIABLE, rank_environment
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USAGE, ConfigError, SlurmddpError
from slurmddp.launchers import failure, linux, outcome
from slurmddp.launchers.node import PRELOAD, enter_project, import_for_all
from slurmddp.launchers.ranks import RankExit, Ranks, RankStart
from slurmddp.launchers.signals import STOP_SIGNALS, SignalInbox
from slurmddp.launchers.trackers import tracker_environment
from slurmddp.runs.fence import superseded
from slurmddp.runs.folder import RunFolder

WORKER = "slurmddp.training.worker:main"
_KILL_GRACE_S = 1.0
"""Between SIGTERM and SIGKILL for the ranks that outlive a failed one: time to end a write, not to save."""
_CAUSE_WAIT_S = 0.3
"""How long a rank that only lost its peer lets the peer's own agent be first to report."""
_LEFT_ALONE_S = 0.9
"""How long the other ranks may take to follow one that has stopped before they are told to."""
_TICK_S = 1.0
_STOPPING_TICK_S = 0.1

Report = Callable[[RunFolder, int], object]


def write_report(folder: RunFolder, code: int) -> object:
    """Write the report of a run whose attempt ends with `code`; its plotting is imported only now."""
    return importlib.import_module("slurmddp.runs.report").write_report(folder, exit_code=code)


def run(
    run_dir: str, *, entry: str = WORKER, preload: Sequence[str] = PRELOAD, report: Report = write_report
) -> int:
    """Run this node's part of an attempt to its end and return the node's exit code."""
    linux.die_with_parent(signal.SIGTERM)
    linux.adopt_orphans()
    folder = RunFolder(run_dir)
    with SignalInbox((*STOP_SIGNALS, signal.SIGINT, signal.SIGCHLD)) as inbox:
        try:
            attempt = _attempt_number(os.environ)
        except SlurmddpError as error:
            _print_error(error)
            return error.exit_code
        try:
            node = detect(os.environ)
        except SlurmddpError as error:
            _print_error(error)
            _record(folder, attempt, _refusal(error, node_rank=int(os.environ.get("SLURM_NODEID") or 0)))
            return error.exit_code
        agent = Agent(folder, attempt, node, inbox)
        code = agent.run(entry, preload)
        if node.node_rank == 0 and code != EXIT_STOPPED and not superseded(folder, attempt):
            _try_report(report, folder, code)
    _write_exit_file(folder, attempt, node.node_rank, code)
    # Told of a failure, srun ends its step by number, and the later attempt's step has the same number.
    return EXIT_FINISHED if superseded(folder, attempt) else code


class Agent:
    """The watch over one node's ranks, from the first import to the exit code."""

    def __init__(self, folder: RunFolder, attempt: int, node: RankInfo, inbox: SignalInbox) -> None:
        self.folder = folder
        self.attempt = attempt
        self.node = node
        self._inbox = inbox
        self._ranks = Ranks(inbox)
        self._stopping = False
        self._limits = read_limits(os.environ)
        self._terminated: float | None = None
        self._left_at: float | None = None
        self._ranks_per_node = 1
        self._imports_s = 0.0

    def run(self, entry: str, preload: Sequence[str]) -> int:
        """Prepare, fork, watch; an error of the agent's own is recorded as this node's failure."""
        try:
            self._prepare(preload)
            if self._read_stop():
                return self._leave_early()
            self._fork_ranks(entry)
            return self._watch()
        except SlurmddpError as error:
            _print_error(error)
            return self._fail_oneself(_refusal(error, node_rank=self.node.node_rank))
        except Exception:
            traceback.print_exc()
            lines = failure.tail_of(traceback.format_exc())
            return self._fail_oneself(failure.here(EXIT_FAILED, node_rank=self.node.node_rank, lines=lines))

    def _prepare(self, preload: Sequence[str]) -> None:
        config = self.folder.config()
        self._ranks_per_node = int(config.get("ranks_per_node") or 1)
        require(self.node, nodes=config.get("nodes"), ranks_per_node=1)
        enter_project(self.folder, config.get("project_dir"))
        started = time.monotonic()
        import_for_all(preload)
        self._imports_s = time.monotonic() - started
        _say(
            f"node {self.node.node_rank} of {self.node.nodes} on {socket.gethostname()}, attempt "
            f"{self.attempt}: imports took {self._imports_s:.2f} s, ranks here: {self._ranks_per_node}"
        )

    def _fork_ranks(self, entry: str) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        common = tracker_environment(self.folder, os.environ)
        common[IMPORTS_VARIABLE] = f"{self._imports_s:.3f}"
        for local_rank in range(self._ranks_per_node):
            self._ranks.fork(
                RankStart(
                    local_rank=local_rank,
                    environ=common | rank_environment(self.node, local_rank, self._ranks_per_node),
                    log=self._log(local_rank),
                    entry=entry,
                    run_dir=str(self.folder.path),
                )
            )

    def _watch(self) -> int:
        codes = []
        while self._ranks:
            self._forward(self._inbox.wait(_STOPPING_TICK_S if self._stopping else _TICK_S))
            ended = self._ranks.reap()
            if bad := [rank for rank in ended if not rank.good]:
                return self._fail(bad)
            codes += [rank.returncode for rank in ended]
            self._pass_on_stop(codes)
            if self._ranks and self._out_of_time():
                _say("SLURM is about to kill: ranks end here, the run goes on from its last checkpoint")
                self._ranks.end(0.0)
                return EXIT_STOPPED
            if self._ranks and self._failed_elsewhere():
                _say("the attempt has failed elsewhere")
                self._ranks.end(_KILL_GRACE_S)
        found = failure.read(self.folder, self.attempt)
        return failure.node_code(found) if found else outcome.combine(codes)

    def _out_of_time(self) -> bool:
        """Whether even the ranks' own guards, which come first, have not made all of them leave in time."""
        at = None if self._terminated is None else leave_at(self._limits, self._terminated, share=0.5)
        return at is not None and time.time() >= at

    def _pass_on_stop(self, codes: Sequence[int]) -> None:
        """Stop the ranks that outlive one which stopped: before the training begins it stops alone."""
        if self._stopping or EXIT_STOPPED not in codes or not self._ranks:
            return
        self._left_at = self._left_at or time.monotonic()
        if time.monotonic() - self._left_at > _LEFT_ALONE_S:
            self._forward([signal.SIGTERM])

    def _forward(self, received: Sequence[signal.Signals]) -> None:
        for sent in received:
            if sent == signal.SIGCHLD:
                continue
            if not self._stopping:
                _say(f"received {sent.name}: the ranks stop at a checkpoint")
            self._stopping = True
            if sent == signal.SIGTERM:
                self._terminated = self._terminated or time.time()
            if not self._failed_elsewhere():
                self._ranks.signal(signal.SIGTERM if sent == signal.SIGINT else sent)

    def _failed_elsewhere(self) -> bool:
        """Whether the attempt has failed already: then there is nobody left to agree with on a save."""
        return self.folder.failure_file(self.attempt).exists()

    def _read_stop(self) -> signal.Signals | None:
        stops = [sent for sent in self._inbox.read() if sent != signal.SIGCHLD]
        return stops[0] if stops else None

    def _leave_early(self) -> int:
        _say("stopped before the ranks were started")
        return EXIT_STOPPED

    def _fail(self, bad: list[RankExit]) -> int:
        failures = [self._failure_of(rank) for rank in bad]
        deadline = time.monotonic() + _CAUSE_WAIT_S
        while failure.is_consequence(failure.likely_first(failures)) and time.monotonic() < deadline:
            if self._failed_elsewhere():
                break
            self._inbox.wait(0.02)
            failures += [self._failure_of(rank) for rank in self._ranks.reap() if not rank.good]
        found = self._record(failures)
        self._ranks.end(_KILL_GRACE_S)
        return failure.node_code(found)

    def _record(self, failures: Sequence[failure.Failure]) -> failure.Failure:
        """Record the likely cause unless the attempt has one, and return the one that stands."""
        cause = failure.likely_first(failures)
        _say(failure.describe(cause))
        _record(self.folder, self.attempt, cause)
        return failure.read(self.folder, self.attempt) or cause

    def _failure_of(self, ended: RankExit) -> failure.Failure:
        return failure.here(
            ended.returncode,
            node_rank=self.node.node_rank,
            rank=self._global_rank(ended.local_rank),
            local_rank=ended.local_rank,
            lines=failure.last_lines(self._log(ended.local_rank)),
        )

    def _fail_oneself(self, why: failure.Failure) -> int:
        """End the ranks and record why this agent itself can't go on."""
        self._ranks.end(0.0)
        self._record([why])
        return why.exit_code or EXIT_FAILED

    def _global_rank(self, local_rank: int) -> int:
        return self.node.node_rank * self._ranks_per_node + local_rank

    def _log(self, local_rank: int) -> Path:
        return self.folder.rank_log(self.attempt, self._global_rank(local_rank))


def _attempt_number(environ: Mapping[str, str]) -> int:
    text = environ.get("SLURMDDP_ATTEMPT", "")
    if not text.isdecimal():
        raise ConfigError(
            f"SLURMDDP_ATTEMPT is {text!r}, not the number of an attempt.",
            hint="The batch script and `slurmddp train` start the agent; they claim an attempt for it.",
        )
    return int(text)


def _refusal(error: SlurmddpError, *, node_rank: int) -> failure.Failure:
    lines = failure.tail_of(f"{error.message}\n{error.hint}")
    return failure.here(error.exit_code, node_rank=node_rank, lines=lines)


def _record(folder: RunFolder, attempt: int, cause: failure.Failure) -> None:
    try:
        failure.record(folder, attempt, cause)
    except OSError as error:  # A full disk may hide which failure it was, never that there was one.
        _say(f"the failure was not recorded: {error}")


def _try_report(report: Report, folder: RunFolder, code: int) -> None:
    """Write the report; a report that can't be written must not change how the run ended."""
    try:
        report(folder, code)
    except Exception as error:
        _say(f"the report was not written: {type(error).__name__}: {error}")


def _write_exit_file(folder: RunFolder, attempt: int, node_rank: int, code: int) -> None:
    path = folder.log_dir(attempt) / f"exit-node-{node_rank}"
    try:
        path.write_text(f"{code}\n", encoding="utf-8")
    except OSError as error:
        _say(f"{path.name} was not written: {error}")


def _print_error(error: SlurmddpError) -> None:
    print(f"Error: {error.message}\n{error.hint}".rstrip(), file=sys.stderr, flush=True)


def _say(text: str) -> None:
    print(f"slurmddp agent: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent for the run folder named on the command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1:
        print("usage: python -m slurmddp.launchers.agent RUN_DIR", file=sys.stderr)
        return EXIT_USAGE
    return run(arguments[0])


if __name__ == "__main__":
    _code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_code)  # Taking an interpreter that holds torch apart costs a quarter of a second.
