"""Draw the pictures of the README from a real training on this machine: `make pictures`.

The training loses one rank and restarts in place. Later it is stopped, and the same command resumes it.
"""

from __future__ import annotations

import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from slurmddp.cli.live_view import RunView
from slurmddp.runs.folder.layout import RunFolder
from support.slurm.run_processes import ranks_of

HERE = Path(__file__).parent
PROJECT = Path(tempfile.gettempdir()) / "demo"
STEPS = 400
KILL_AT, DRAW_AT, STOP_AT = 130, 220, 260
"""Steps: when a rank is killed, when the terminal is drawn, when the training is stopped."""
COMMAND = ["slurmddp", "train", "name=first", f"train.steps={STEPS}", "train.save_every=100"]
TERMINAL_COLUMNS = 100
PAGE_WIDTH, PAGE_HEIGHT = 1080, 1605
"""Pixels of the report from its top down to its table of attempts."""


class Recorder(RunView):
    """The live view of a run, which keeps the lines that it would print above its bar."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(folder, STEPS, stream=io.StringIO(), live=True)
        self._events.offset = self._metrics.offset = 0  # The run began before the view.
        self.lines: list[str] = []

    def print(self, text: str) -> None:
        self.lines.append(text)

    def wait_for(self, step: int, training: subprocess.Popen[str]) -> None:
        self._wait(lambda: self.progress.step >= step and not self.progress.activity, training)

    def _wait(self, ready: Callable[[], bool], training: subprocess.Popen[str]) -> None:
        while not ready():
            if training.poll() is not None:
                sys.exit(f"The training ended with code {training.returncode}: see {PROJECT}.")
            time.sleep(0.2)
            self.tick()

    def draw(self, before: list[str], path: Path) -> None:
        """Write the terminal as it looks now: the command, the lines so far, and the progress bar."""
        screen = Console(file=io.StringIO(), record=True, width=TERMINAL_COLUMNS, force_terminal=True)
        screen.print(f"$ {shlex.join(COMMAND)}", style="bold", highlight=False)
        for line in (*before, *self.lines):
            screen.print(line, markup=False, highlight=False)
        assert self._bar is not None
        screen.print(self._bar.get_renderable())
        path.write_text(screen.export_svg(title="slurmddp train"), encoding="utf-8")


def start() -> subprocess.Popen[str]:
    program = Path(sys.executable).with_name(COMMAND[0])
    environ = {**os.environ, "XDG_STATE_HOME": str(PROJECT / "state")}
    return subprocess.Popen(
        [program, *COMMAND[1:]], cwd=PROJECT, env=environ, stdout=subprocess.PIPE, text=True
    )


def first_lines(training: subprocess.Popen[str], count: int = 2) -> list[str]:
    assert training.stdout is not None
    return [training.stdout.readline().rstrip() for _ in range(count)]


def main() -> None:
    shutil.rmtree(PROJECT, ignore_errors=True)
    PROJECT.mkdir()
    training = start()
    said = first_lines(training)
    folder = RunFolder(next((PROJECT / "runs").iterdir()))
    with Recorder(folder) as view:
        view.wait_for(KILL_AT, training)
        ranks_of(folder.path)[1].kill()
        view.wait_for(DRAW_AT, training)
        view.draw(said, HERE / "live-view.svg")
        view.wait_for(STOP_AT, training)
    training.send_signal(signal.SIGTERM)
    training.communicate()
    start().communicate()
    shot = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={PAGE_WIDTH},{PAGE_HEIGHT}"]
    page, picture = folder.report_file, HERE / "report.png"
    subprocess.run(["chromium", *shot, f"--screenshot={picture}", page.as_uri()], check=True)


if __name__ == "__main__":
    main()
