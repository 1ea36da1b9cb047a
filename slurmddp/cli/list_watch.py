"""Show the table of runs until the reader quits: `slurmddp list --watch`.

The view reads the run folders at every refresh. It queries SLURM at the pace of `PacedClient`.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmddp.errors import EXIT_FINISHED, ConfigError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.run_status import RunStatus, status, statuses
from slurmddp.runs.text_format import counted, duration, is_terminal
from slurmddp.slurm.paced_client import PacedClient

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

REFRESH_S = 5.0
"""Seconds between two refreshes: often enough for a reader, and a small load for a file server."""
_LINES_BESIDE_ROWS = 4
"""Number of screen lines that show no run: heading, rule, blank line, footer."""


@dataclass(frozen=True)
class ListView:
    """The table of the newest runs, as many as fit the screen.

    Args:
        paths: returns the paths of local runs, the most recently active first; called at each refresh.
        limit: the largest number of runs to show; None: as many as fit.
        table: returns the table of the given statuses.
        slurm: the client that queries SLURM.
        over_ssh: returns the statuses of runs on other machines, without waiting for these machines.
        states: the states of the runs to show; empty: all states.
    """

    paths: Callable[[], Sequence[str]]
    limit: int | None
    table: Callable[[Sequence[RunStatus]], Table]
    slurm: PacedClient
    over_ssh: Callable[[], Sequence[RunStatus]] = list
    states: frozenset[str] = frozenset()

    def watch(self) -> int:
        """Show the table until the reader types q or Ctrl-C; return exit code 0.

        Raises:
            ConfigError: the output is not a terminal.
        """
        if not is_terminal(sys.stdout):
            raise ConfigError(
                "--watch needs a terminal, but the output goes to a file or a pipe.",
                hint="`slurmddp list` prints the table once, `slurmddp list --json` prints it as JSON.",
            )

        from rich.console import Console
        from rich.live import Live

        console = Console()

        try:
            with (
                _single_keys() as quits,
                Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
            ):
                while True:
                    rows = max(1, console.size.height - _LINES_BESIDE_ROWS)
                    live.update(self.render(rows), refresh=True)
                    if quits(REFRESH_S):
                        return EXIT_FINISHED
        except KeyboardInterrupt:
            return EXIT_FINISHED

    def render(self, rows: int) -> RenderableType:
        """Return the table of at most `rows` runs, and the line below it."""
        from rich.console import Group
        from rich.text import Text

        paths = self.paths()
        statuses_over_ssh = self.over_ssh()
        limit = min(rows, self.limit or rows)

        # Without a filter by state, only the runs that are shown have to be read.
        read_paths = paths if self.states else paths[:limit]
        runs = [*self.read([RunFolder(path) for path in read_paths]), *statuses_over_ssh]
        count = len(paths) + len(statuses_over_ssh)
        if self.states:
            runs = [run for run in runs if run.state in self.states]
            count = len(runs)

        # Sorted by creation time. Sorted by last activity, running runs would change places all the time.
        runs.sort(key=lambda run: (run.created or 0.0, run.name), reverse=True)
        shown = runs[:limit]

        unreached = dict.fromkeys(run.detail for run in statuses_over_ssh if run.state == "unknown")
        footer = "   ".join([self._footer(shown, count), *unreached])
        return Group(self.table(shown), "", Text(footer, style="bright_black"))

    def read(self, folders: Sequence[RunFolder]) -> list[RunStatus]:
        """Return the statuses of runs.

        SLURM is queried only from time to time. The status of a run whose job was submitted after the last
        query is read from its run folder alone.
        """
        runs = statuses(folders, self.slurm)
        if self.slurm.error is not None:
            # SLURM did not answer, so these runs are shown as unknown, not as their folders describe them.
            return runs

        return [
            status(folder, None) if run.job_id in self.slurm.not_asked else run
            for folder, run in zip(folders, runs, strict=True)
        ]

    def _footer(self, runs: Sequence[RunStatus], count: int) -> str:
        """Return the line below the table: keys, number of runs, time, and the next query of SLURM."""
        number = counted(count, "run")
        if count > len(runs):
            number = f"{len(runs)} of {number}"

        parts = ["q quits", number, time.strftime("%H:%M:%S")]
        pause = duration(self.slurm.due_in_s)
        if self.slurm.error is not None:
            parts.append(f"SLURM does not answer, next try in {pause}: {self.slurm.error.message}")
        elif self.slurm.due_in_s is not None:
            parts.append(f"next query of SLURM in {pause}")

        return "   ".join(parts)


@contextmanager
def _single_keys() -> Iterator[Callable[[float], bool]]:
    """Read the keys of the terminal without Enter inside the block.

    Yields:
        A function that waits the given number of seconds for the key q. It returns True as soon as q is
        typed or the terminal is closed, else False.
    """
    if not sys.stdin.isatty():
        yield lambda seconds: bool(select.select([], [], [], seconds)[0])
        return

    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)

    def quits(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            if select.select([terminal], [], [], remaining)[0]:
                typed = os.read(terminal, 64)
                # `read` returns no bytes once the terminal is closed.
                if not typed or b"q" in typed.lower():
                    return True

        return False

    try:
        yield quits
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
