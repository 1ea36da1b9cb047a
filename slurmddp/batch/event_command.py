"""Run the command of `policy.on_event` for an event; a command that fails or hangs changes no run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurmddp.environments.names import ATTEMPT_VARIABLE, EVENT_VARIABLE, RUN_DIR_VARIABLE
from slurmddp.runs.folder.layout import RunFolder

TIMEOUT_S = 20
"""Seconds after which the command is killed. A job that ends keeps its nodes until its commands end."""
_SLACK_S = 5
"""Seconds after TIMEOUT_S in which the watching process kills the command and records the failure."""


def kind_of_end(outcome: str, next_: str) -> str:
    """Return the event for an attempt's end: `requeued`, `finished`, `stopped`, `cancelled` or `failed`."""
    if next_ != "none":
        return "requeued"
    return outcome if outcome in ("finished", "stopped", "cancelled") else "failed"


class EventCommands:
    """Starts the command of `policy.on_event` for each event, and waits for the started commands."""

    def __init__(
        self, folder: RunFolder, command: Sequence[str], project: Path, log: Callable[[str], None]
    ) -> None:
        """Store the command and its working folder; start nothing.

        Args:
            folder: the run folder.
            command: the program and its arguments, from `policy.on_event`; empty: no event starts anything.
            project: the folder in which the command runs.
            log: called with a line if the command can't be started.
        """
        self._folder = folder
        self._command = command
        self._project = project
        self._log = log
        self._watchers: list[subprocess.Popen[bytes]] = []

    def start(self, kind: str, attempt: int, **facts: Any) -> None:
        """Start the command for an event, and return at once.

        A separate process watches the command, because the caller may end or be killed while it runs.

        Args:
            kind: started, requeued, finished, stopped, cancelled or failed.
            attempt: the number of the attempt.
            facts: further fields of the event.
        """
        if not self._command:
            return

        run = {"run": self._folder.name, "run_dir": str(self._folder.path)}
        event = {"event": kind, **run, "attempt": attempt, "time": round(time.time(), 3), **facts}
        environ = {**os.environ, RUN_DIR_VARIABLE: str(self._folder.path), ATTEMPT_VARIABLE: str(attempt)}

        frozen = self._folder.batch_file
        program = ["-m", "slurmddp.batch"]
        if frozen.exists():
            program = ["-IS", str(frozen)]
        try:
            with self._folder.event_log(attempt).open("ab") as stream:
                watcher = subprocess.Popen(
                    [sys.executable, *program, "event"],
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    cwd=self._project if self._project.is_dir() else None,
                    env={**environ, EVENT_VARIABLE: kind},
                    start_new_session=True,
                )
            self._watchers.append(watcher)
            if watcher.stdin is not None:
                watcher.stdin.write(json.dumps({"command": [*self._command], "event": event}).encode())
                watcher.stdin.close()
        except OSError as error:
            self._log(f"The command of policy.on_event was not started: {error}")

    def wait(self) -> None:
        """Wait until each started command has ended or was killed, 25 seconds at most."""
        deadline = time.monotonic() + TIMEOUT_S + _SLACK_S
        for watcher in self._watchers:
            with suppress(subprocess.TimeoutExpired):
                watcher.wait(max(0.0, deadline - time.monotonic()))
        self._watchers.clear()


def run_command(folder: RunFolder, request: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> None:
    """Run a command with an event as JSON on its stdin; record its failure as a warning of the run.

    Args:
        folder: the run folder.
        request: the program with its arguments, under `command`, and the fields of the event, under `event`.
        timeout_s: seconds after which the command and its children are killed.
    """
    command = request["command"]
    event = request["event"]
    failure = _run(command, json.dumps(event).encode() + b"\n", timeout_s)
    if not failure:
        return

    folder.add_event(
        "warned",
        attempt=event["attempt"],
        text=f"policy.on_event: `{command[0]}` {failure} (event: {event['event']}); "
        f"its output is in {folder.event_log(event['attempt'])}",
    )


def _run(command: Sequence[str], text: bytes, timeout_s: float) -> str:
    """Run a command, and return a phrase that describes its failure; empty for exit code 0."""
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        return f"can't be started ({error.strerror})"

    try:
        process.communicate(text, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"was killed after {timeout_s:g} s"

    if process.returncode != 0:
        return f"ended with exit code {process.returncode}"
    return ""
