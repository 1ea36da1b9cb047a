"""Agents of local runs, forked from the server that has imported torch, so that a run costs no import."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import reduction
from pathlib import Path
from typing import IO, Any

import torch

from slurmddp.environments.emit import emulated_step
from slurmddp.environments.scrub import scrub
from slurmddp.host import process
from slurmddp.launchers.agent.agent import WORKER, run
from slurmddp.launchers.agent.preload import PRELOAD
from slurmddp.launchers.coordinator import coordinator
from slurmddp.runs.folder.layout import RunFolder
from support.distributed.ranks import CONTEXT

START_BOUND = process.start_bound


class Descriptor:
    """A descriptor as an argument of a forked process: it is duplicated into that process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.number)

    def __setstate__(self, duplicate: Any) -> None:
        self.number = duplicate.detach()


class ForkedAgent:
    """A forked agent with the interface of subprocess.Popen."""

    def __init__(
        self,
        run_dir: str,
        log: IO[bytes],
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        cwd: Path,
        **options: Any,
    ) -> None:
        passed = [Descriptor(number) for number in (log.fileno(), *pass_fds)]
        self._process = CONTEXT.Process(
            target=be_agent, args=(run_dir, dict(env), str(cwd), passed), kwargs=options
        )
        self._process.start()
        self.pid = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("agent", timeout or 0.0)
        return code

    def send_signal(self, sent: signal.Signals) -> None:
        os.kill(self.pid, sent)


def start(python: str, command: Sequence[str], death_signal: signal.Signals, **options: Any) -> Any:
    """Take the place of `process.start_bound`: fork agents from the server, start other programs as usual.

    Scripts of the agent's ranks run in the interpreter `python`.
    """
    if list(command[1:-1]) != ["-m", "slurmddp.launchers.agent"]:
        return START_BOUND(command, death_signal, **options)

    given = (options[name] for name in ("stdout", "pass_fds", "env", "cwd"))
    return ForkedAgent(command[-1], *given, python=python)


@contextmanager
def agents_of(
    folder: RunFolder, nodes: int, *, threads: str | None = "1", **options: Any
) -> Iterator[list[ForkedAgent]]:
    """Fork the agents of all nodes of a first attempt; none outlives the block.

    `threads` is the value of OMP_NUM_THREADS; None: it is not set.
    """
    folder.log_dir(0).mkdir(parents=True)
    agents = []
    for node in range(nodes):
        environ = scrub(os.environ) | emulated_step(nodes, node, "local-1", folder.path, 0)
        environ.pop("OMP_NUM_THREADS", None)
        if threads is not None:
            environ["OMP_NUM_THREADS"] = threads
        with (folder.log_dir(0) / f"node-{node}.log").open("ab") as log:
            agents.append(ForkedAgent(str(folder.path), log, (), environ, folder.path, **options))

    try:
        yield agents
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGKILL)
            agent.wait()


def be_agent(
    run_dir: str,
    environ: Mapping[str, str],
    folder: str,
    passed: Sequence[Descriptor],
    *,
    entry: str = WORKER,
    preload: Sequence[str] = PRELOAD,
    cause_wait_s: float = coordinator.CAUSE_WAIT_S,
    python: str = sys.executable,
) -> None:
    """Act as `python -m slurmddp.launchers.agent RUN_DIR`, in a new session."""
    os.setsid()
    sys.executable = python
    coordinator.CAUSE_WAIT_S = cause_wait_s
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(passed[0].number, stream)
    os.close(passed[0].number)
    sys.path.insert(0, folder)
    multiprocessing.set_start_method("fork", force=True)
    if threads := environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))  # The server has imported torch without this variable.
    code = run(run_dir, entry=entry, preload=preload)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
