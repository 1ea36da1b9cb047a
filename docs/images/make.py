"""Draw the pictures of README and docs from real runs on this machine: `make pictures`; ARGS names some.

- `training`: the live view and the report of a training that loses one rank, is stopped and resumed;
- `sweep`: the report of a sweep;
- `preemption`: the watched list of runs, and the report of a run that SLURM preempts, in a sandbox;
- `controller`: a script that controls three workers.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console, RenderableType
from rich.text import Text

from slurmddp.cli.live_view import RunView
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.sandbox import Sandbox
from support.slurm.run_processes import ranks_of

HERE = Path(__file__).parent
PROJECT = Path(tempfile.gettempdir()) / "demo"
ENVIRON = {**os.environ, "XDG_STATE_HOME": str(PROJECT / "state")}
STEPS = 400
KILL_AT, DRAW_AT, STOP_AT = 130, 220, 260
"""Steps: when a rank is killed, when the terminal is drawn, when the training is stopped."""
COMMAND = ["slurmddp", "train", "name=first", f"train.steps={STEPS}", "train.save_every=100"]
SWEEP = [
    "train",
    "-m",
    "model=gpt_tiny",
    "train.steps=60",
    "name=rates",
    "seed=1,2",
    "optimizer.lr=1e-3,3e-3,1e-2",
]
# Each run takes all CPUs, so that the urgent run preempts the long run.
SANDBOX = "defaults:\n  - model: gpt_tiny\nnodes: 2\ncpus_per_node: 2\n"
LONG = ["train", "+cluster=sandbox", "name=long", "train.steps=400"]
URGENT = ["train", "+cluster=sandbox", "name=urgent", "train.steps=60", "partition=high"]
PREEMPT_AT = 150
"""The step of the long run at which the urgent run preempts it."""
SESSION = [
    "import torch",
    "from slurmddp import remote",
    "w = remote.workers(2)",
    "x = remote.full((2, 3), 4.0, node=1)  # made on worker 1",
    "y = torch.ones(2, 3).dist_send(node=1)",
    "z = x + y  # runs on worker 1",
    "z",
    "z.fetch()",
    "with remote.node(0): a = torch.zeros(2, 3)",
    "",
    "w.all_reduce([a, z], 'mean')  # from worker to worker",
    "a.fetch()",
    "a + z",
]
"""Lines that are typed into an interpreter; the empty line ends the block of `with`."""
TERMINAL_COLUMNS = 100
PAGE_WIDTH, PAGE_HEIGHT = 1080, 4000
"""Pixels of a window that shows a whole report; the empty part below the report is cut off."""


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
        assert self._bar is not None
        lines = [Text(line) for line in (*before, *self.lines)]
        draw_terminal(COMMAND, [*lines, self._bar.get_renderable()], path)


def draw_terminal(
    command: Sequence[str], content: Sequence[RenderableType], path: Path, columns: int = TERMINAL_COLUMNS
) -> None:
    """Write a picture of a terminal with a command and what it printed."""
    screen = Console(file=io.StringIO(), record=True, width=columns, force_terminal=True)
    screen.print(f"$ {shlex.join(command)}", style="bold", highlight=False)
    for part in content:
        screen.print(part, markup=False, highlight=False)
    path.write_text(screen.export_svg(title=" ".join(command[:2])), encoding="utf-8")


def draw_report(page: Path, path: Path, sections: Sequence[str] = ()) -> None:
    """Write a picture of a report, or of its head and the sections with these headings."""

    def kept(section: re.Match[str]) -> str:
        heading = re.search(r"<h2>(.*?)</h2>", section[0])
        return section[0] if not sections or (heading and heading[1] in sections) else ""

    text = re.sub(r"<section[^>]*>.*?</section>", kept, page.read_text(), flags=re.DOTALL)
    shown = PROJECT / "shown.html"
    shown.write_text(text)
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={PAGE_WIDTH},{PAGE_HEIGHT}"]
    subprocess.run(["chromium", *options, f"--screenshot={path}", shown.as_uri()], check=True)
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
        filled = np.flatnonzero((pixels != pixels[-1, 0]).any(axis=(1, 2)))
        picture.crop((0, 0, PAGE_WIDTH, int(filled[-1]) + 24)).save(path, optimize=True)


def slurmddp(*arguments: str, environ: Mapping[str, str] = ENVIRON) -> str:
    """Run slurmddp in the project folder and return what it prints."""
    program = Path(sys.executable).with_name("slurmddp")
    return subprocess.run(
        [program, *arguments], cwd=PROJECT, env=environ, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def screen_of(
    command: Sequence[str], columns: int, rows: int, environ: Mapping[str, str], seconds: float, keys: bytes
) -> str:
    """Run slurmddp in a terminal, type keys after some seconds, and return what the terminal received."""
    terminal, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    program = [Path(sys.executable).with_name(command[0]), *command[1:]]
    typed = {**environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
    started = subprocess.Popen(program, cwd=PROJECT, env=typed, stdin=side, stdout=side, stderr=side)
    os.close(side)
    time.sleep(seconds)
    os.write(terminal, keys)
    received = b""
    while True:
        try:
            received += os.read(terminal, 65536)
        except OSError:  # The program has closed its side.
            break
    os.close(terminal)
    started.wait()
    return received.decode()


def start() -> subprocess.Popen[str]:
    program = Path(sys.executable).with_name(COMMAND[0])
    return subprocess.Popen(
        [program, *COMMAND[1:]], cwd=PROJECT, env=ENVIRON, stdout=subprocess.PIPE, text=True
    )


def first_lines(training: subprocess.Popen[str], count: int = 2) -> list[str]:
    assert training.stdout is not None
    return [training.stdout.readline().rstrip() for _ in range(count)]


def draw_training() -> None:
    training = start()
    printed = first_lines(training)
    folder = RunFolder(next((PROJECT / "runs").glob("first-*")))
    with Recorder(folder) as view:
        view.wait_for(KILL_AT, training)
        ranks_of(folder.path)[1].kill()
        view.wait_for(DRAW_AT, training)
        view.draw(printed, HERE / "live-view.svg")
        view.wait_for(STOP_AT, training)
    training.send_signal(signal.SIGTERM)
    training.communicate()
    start().communicate()
    sections = ["Loss", "Optimizer", "Where the time went"]
    draw_report(folder.report_file, HERE / "report.png", sections)


def draw_sweep() -> None:
    slurmddp(*SWEEP)
    page = slurmddp("report", "rates-sweep").split()[-1]
    draw_report(Path(page), HERE / "sweep.png")


def draw_preemption() -> None:
    (PROJECT / "conf").mkdir()
    (PROJECT / "conf" / "slurmddp.yaml").write_text(SANDBOX)
    sandbox = Sandbox("pictures", root=PROJECT / "sandbox", cpus=2)
    sandbox.up()
    environ = {**ENVIRON, **sandbox.environment()}

    def wait_for(run: str, ready: Callable[[dict], bool]) -> None:
        while not ready(status := json.loads(slurmddp("status", "--json", run, environ=environ))):
            if status["state"] in ("failed", "lost", "cancelled"):
                sys.exit(f"{run} is {status['state']}: see {PROJECT}.")
            time.sleep(1)

    try:
        slurmddp(*LONG, environ=environ)
        wait_for("long", lambda status: (status["step"] or 0) >= PREEMPT_AT)
        slurmddp(*URGENT, environ=environ)
        wait_for("urgent", lambda status: (status["step"] or 0) >= 10)
        command = ["slurmddp", "list", "--watch"]
        received = screen_of(command, columns=124, rows=12, environ=environ, seconds=4, keys=b"q")
        frame = re.sub(r"\x1b\[[0-9;?]*[A-LN-Za-ln-z]|\r", "", received.split("\x1b[H")[-1]).rstrip()
        draw_terminal(command, [Text.from_ansi(frame)], HERE / "list.svg", columns=124)
        wait_for("long", lambda status: status["state"] == "finished")
        folder = RunFolder(next((PROJECT / "runs").glob("long-*")))
        draw_report(folder.report_file, HERE / "preempted.png", ["Loss", "Where the time went", "Attempts"])
    finally:
        sandbox.down()


def draw_controller() -> None:
    """Draw a session of the interpreter."""
    typed = "".join(f"{line}\n" for line in SESSION)
    session = subprocess.run(
        [sys.executable, "-i", "-q"],
        cwd=PROJECT,
        env={**ENVIRON, "PYTHON_BASIC_REPL": "1"},
        input=typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    prompts = re.split(r"(>>> |\.\.\. )", session.stdout)
    content = []
    for line, prompt, printed in zip(SESSION, prompts[1::2], prompts[2::2], strict=False):
        content.append(Text.assemble(prompt, (line, "bold")))
        content += (
            [Text(row) for row in printed.splitlines()[-1:]]
            if "Error" in printed
            else [Text(printed.rstrip())]
        )
    draw_terminal(["python"], [part for part in content if part.plain], HERE / "controller.svg")


PICTURES = {
    "training": draw_training,
    "sweep": draw_sweep,
    "preemption": draw_preemption,
    "controller": draw_controller,
}


def main() -> None:
    shutil.rmtree(PROJECT, ignore_errors=True)
    PROJECT.mkdir()
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main()
