"""Show the table of runs until the reader quits: `slurmddp list --watch`.

The view reads the run folders at every refresh. SLURM is asked at the pace of `PacedClient`.
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
"""Seconds between two readings of the run folders: often enough for a person, and rare for a file server."""
_LINES_BESIDE_ROWS = 4
"""Lines of the screen that hold no run: heading, rule, blank line, footer."""


@dataclass(frozen=True)
class ListView:
    """The table of the newest runs, as many as fit the screen.

    Args:
        runs: returns the paths of the runs, the newest activity first, for each refresh.
        limit: shows so many runs, at most; None: as many as fit.
        table: draws the statuses of runs.
        slurm: asks SLURM.
        there: returns the statuses of runs on other machines, without waiting for these machines.
        states: shows only runs in these states; empty: in any.
    """

    runs: Callable[[], Sequence[str]]
    limit: int | None
    table: Callable[[Sequence[RunStatus]], Table]
    slurm: PacedClient
    there: Callable[[], Sequence[RunStatus]] = list
    states: frozenset[str] = frozenset()

    def watch(self) -> int:
        """Show the table until the reader types q or Ctrl-C, and return exit code 0.

        Raises:
            ConfigError: the output is not a terminal.
        """
        if not is_terminal(sys.stdout):
            raise ConfigError(
                "--watch needs a terminal, but the output goes to a file or a pipe.",
                hint="`slurmddp list` prints the table once, `slurmddp list --json` prints it for programs.",
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
        """Return the table of `rows` runs, at most, and the line below it."""
        from rich.console import Group
        from rich.text import Text

        runs, there = self.runs(), self.there()
        most = min(rows, self.limit or rows)
        # Ordered by age: by their last activity running runs would change places all the time.
        shown = [*self.read([*map(RunFolder, runs if self.states else runs[:most])]), *there]
        shown = [run for run in shown if not self.states or run.state in self.states]
        count = len(shown) if self.states else len(runs) + len(there)
        shown.sort(key=lambda run: (run.created or 0.0, run.name), reverse=True)

        silent = dict.fromkeys(run.detail for run in there if run.state == "unknown")
        footer = "   ".join([self._footer(shown[:most], count), *silent])
        return Group(self.table(shown[:most]), "", Text(footer, style="bright_black"))

    def read(self, folders: Sequence[RunFolder]) -> list[RunStatus]:
        """Return the statuses of runs; the folder alone judges a run newer than SLURM's answer."""
        runs = statuses(folders, self.slurm)
        if self.slurm.error is not None:  # Their states are unknown.
            return runs
        return [
            status(folder, None) if run.job_id in self.slurm.not_asked else run
            for folder, run in zip(folders, runs, strict=True)
        ]

    def _footer(self, runs: Sequence[RunStatus], count: int) -> str:
        number = counted(count, "run")
        if count > len(runs):
            number = f"{len(runs)} of {number}"
        parts = [number, time.strftime("%H:%M:%S")]
        pause = duration(self.slurm.due_in_s)
        if self.slurm.error is not None:
            parts.append(f"next try in {pause}, since SLURM does not answer: {self.slurm.error.message}")
        elif self.slurm.due_in_s is not None:
            parts.append(f"next query of SLURM in {pause}")
        return "   ".join(["q quits", *parts])


@contextmanager
def _single_keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits some seconds and returns whether q was typed, without Enter."""
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
        while (left := end - time.monotonic()) > 0:
            if select.select([terminal], [], [], left)[0]:
                typed = os.read(terminal, 64)
                if not typed or b"q" in typed.lower():  # No byte: the terminal is gone.
                    return True
        return False

    try:
        yield quits
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
