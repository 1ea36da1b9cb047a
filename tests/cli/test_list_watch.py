"""`slurmddp list --watch`: the table of runs until the reader quits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from slurmddp.cli.commands import list as command
from slurmddp.cli.list_watch import ListView
from slurmddp.cli.main import main
from slurmddp.errors import EXIT_CONFIG
from slurmddp.runs import index
from slurmddp.runs.text_format import rich_table
from slurmddp.slurm.paced_client import PacedClient
from support.runs.cli_runs import end, start, submit

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def shown(programs):
    """Return the lines of the view at a time on its clock."""
    at = [0.0]
    client = PacedClient(now=lambda: at[0])

    def table(found):
        return rich_table(command.HEADERS, command._rows(found, time.time())[0])

    def show(now, rows=20, limit=20):
        at[0] = float(now)
        console = Console(width=200, color_system=None)
        with console.capture() as captured:
            console.print(ListView(index.run_paths, limit, table, client).render(rows))
        return captured.get().splitlines()

    return show


def states(lines):
    return {words[0]: words[1] for line in lines[2:] if len(words := line.split()) > 4 and words[0] != "q"}


def test_the_table_follows_folders_at_once_and_slurm_every_30_seconds(make_run, shown, programs):
    first, second = make_run("gpt-00000001"), make_run("mlp-00000002")
    submit(first, "7")
    programs.write("jobs/7", "PENDING||Priority|\n")
    assert states(shown(0)) == {"gpt-00000001": "queued", "mlp-00000002": "preparing"}
    submit(second, "8")
    assert states(shown(5))["mlp-00000002"] == "queued"  # SLURM has not been asked for this job yet.
    start(first)
    programs.write("jobs/7", "RUNNING|n1||\n")
    programs.write("jobs/8", "PENDING||Priority|\n")
    shown(25)
    assert programs.calls("squeue") == 1
    assert states(shown(30)) == {"gpt-00000001": "starting", "mlp-00000002": "queued"}
    assert programs.calls("squeue") == 2
    end(first, "finished")
    assert states(lines := shown(35))["gpt-00000001"] == "finished"
    assert lines[-1].startswith("q quits") and lines[-1].endswith("next query of SLURM in 25s")


def test_a_run_is_unknown_while_slurm_does_not_answer(make_run, shown, programs):
    submit(make_run(), "7")
    programs.write("silence", "slurm_load_jobs error: Unable to contact slurm controller")
    for now in (0, 5, 30, 35):
        lines = shown(now)
        assert states(lines) == {"gpt-0a1b2c3d": "unknown"}
    assert programs.calls("squeue") == 2
    submit(make_run("gpt-0000000f"), "8")
    lines = shown(40)
    assert set(states(lines).values()) == {"unknown"}
    assert "SLURM does not answer, next try in 50s: squeue failed: slurm_load_jobs error" in lines[-1]


def test_no_more_runs_are_read_than_the_screen_holds(make_run, shown):
    for number in range(6):
        make_run(f"gpt-0000000{number}")
    assert len(states(lines := shown(0, rows=3))) == 3 and "3 of 6 runs" in lines[-1]
    assert len(states(shown(0, rows=3, limit=2))) == 2
    assert len(states(shown(0, rows=9, limit=None))) == 6


@pytest.mark.parametrize("key", ["q", "Ctrl-C"])
def test_q_and_ctrl_c_end_the_view_in_good_order(make_run, programs, key):
    make_run()
    window, terminal = os.openpty()
    command = [sys.executable, "-m", "slurmddp", "list", "--watch"]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as view:
        os.close(terminal)
        screen = b""
        while b"q quits" not in screen:
            screen += os.read(window, 4096)
        assert b"gpt-0a1b2c3d" in screen
        if key == "q":
            os.write(window, b"q")
        else:
            view.send_signal(signal.SIGINT)
        assert view.wait(240) == 0
    rest = os.read(window, 4096)
    os.close(window)
    assert b"\x1b[?1049l" in rest  # The terminal shows again what stood there before.
    assert b"Traceback" not in rest


def test_without_a_terminal_the_view_is_refused(make_run, programs, capsys):
    make_run()
    assert main(["list", "--watch"]) == EXIT_CONFIG
    assert "--watch needs a terminal" in capsys.readouterr().err
    assert programs.calls("squeue") == 0
    assert main(["list", "--watch", "--json"]) == 2
