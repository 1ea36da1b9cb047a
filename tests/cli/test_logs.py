"""`slurmddp logs`, once and following, by run name from any folder."""

from __future__ import annotations

import pytest

from slurmddp.cli.main import main
from slurmddp.errors import EXIT_CONFIG, EXIT_USAGE, SlurmError
from slurmddp.runs.status.run_end import end_of
from slurmddp.slurm import command
from support.runs.cli_runs import end, start, submit

pytestmark = pytest.mark.usefixtures("elsewhere")


def logged(folder):
    submit(folder)
    start(folder)
    for rank in range(2):
        (folder.log_dir(0) / f"node-{rank}.log").write_text(f"agent {rank}\n")
        folder.rank_log(0, rank).write_text("".join(f"line {at} of {rank}\n" for at in range(100)))


def test_logs_show_rank_0(make_run, slurm, capsys):
    logged(make_run())
    assert main(["logs", "gpt", "-n", "2"]) == 0
    assert capsys.readouterr().out == "[rank 0] line 98 of 0\n[rank 0] line 99 of 0\n"


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ([], 40),
        (["-n", "all"], 100),
        (["--all", "-n", "1"], 4),
        (["--rank", "1"], 40),
        (["--node", "1"], 1),
        (["--node", "0", "--node", "1", "--rank", "1"], 42),
    ],
)
def test_logs_of_the_wanted_lines_and_ranks(make_run, slurm, capsys, flags, count):
    logged(make_run())
    assert main(["logs", "gpt", *flags]) == 0
    assert len(capsys.readouterr().out.splitlines()) == count


@pytest.mark.parametrize("attempts", [0, 1])
@pytest.mark.parametrize("flags", [["-n", "2"], ["-f", "-n", "2"]], ids=["once", "following"])
def test_logs_show_what_a_job_printed_that_began_no_attempt(make_run, slurm, capsys, attempts, flags):
    folder = make_run()
    if attempts:
        logged(folder)
        end(folder, "stopped")
    submit(folder, job_id="8")
    folder.log_dir(0).mkdir(parents=True, exist_ok=True)
    folder.job_log("8").write_text("module: loaded\nThere is no python3 on c07,\nso nothing was started.\n")
    slurm.set_state("8", "FAILED")
    assert main(["logs", "gpt", *flags]) == 0
    printed = capsys.readouterr().out
    reason = "[job 8] There is no python3 on c07,\n[job 8] so nothing was started.\n"
    assert f"-- job 8 began no attempt:\n{reason}" in printed
    assert ("[rank 0] line 99 of 0" in printed) == bool(attempts)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--attempt", "3"], "no attempt 3"),
        (["--rank", "7"], "no log of rank 7"),
        (["--node", "9"], "no log of node 9. It has logs of: rank 0, rank 1, node 0, node 1."),
    ],
)
def test_logs_that_are_not_there(make_run, slurm, capsys, flags, said):
    logged(make_run())
    assert main(["logs", "gpt", *flags]) == EXIT_CONFIG
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("lines", ["many", "-3", "1.5", ""])
def test_a_number_of_lines_that_is_none_is_of_the_wrong_kind(make_run, slurm, capsys, lines):
    logged(make_run())
    assert main(["logs", "gpt", f"--lines={lines}"]) == EXIT_USAGE
    assert f"{lines!r} is neither a number of lines nor `all`" in capsys.readouterr().err


def test_logs_before_the_first_attempt_say_what_it_waits_for(make_run, slurm, capsys):
    submit(make_run())
    slurm.set_state("7", "PENDING", reason="Resources")
    assert main(["logs", "gpt"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "nodes that it needs are busy" in err


def test_following_an_ended_run_shows_its_end(make_run, slurm, capsys):
    folder = make_run()
    logged(folder)
    end(folder, "finished")
    assert main(["logs", "-f", "gpt", "-n", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0] line 99 of 0",
        "-- attempt 0: finished, exit code 0",
        "-- finished: all steps are done",
    ]


def test_following_ends_when_slurm_has_lost_the_job(make_run, slurm, capsys):
    logged(make_run())
    assert main(["logs", "-f", "gpt", "-n", "1"]) == 0
    assert "-- lost: SLURM no longer knows job 7" in capsys.readouterr().out


def test_following_asks_slurm_seldom(make_run, slurm):
    folder = make_run()
    logged(folder)
    slurm.set_state("7", "RUNNING")
    now = 0.0
    queries = []
    slurm.jobs = lambda ids: queries.append(now) or {"7": slurm.states["7"]}
    has_ended = end_of(folder, slurm, clock=lambda: now)
    while now < 300:
        assert not has_ended()
        now += 1.0
    assert len(queries) == 10


def test_following_asks_a_silent_slurm_ever_less_often(make_run, slurm):
    folder = make_run()
    logged(folder)
    now = 0.0
    queries = []

    def silent(ids):
        queries.append(now)
        raise SlurmError("squeue gave no answer within 10 s.")

    slurm.jobs = silent
    has_ended = end_of(folder, slurm, clock=lambda: now)
    while now <= 1100:
        assert not has_ended()
        now += 1.0
    assert queries == [0, 60, 180, 420, 720, 1020]
    slurm.jobs = lambda ids: {}
    now += 300
    assert has_ended()


def test_a_slow_slurm_is_not_told_among_the_lines(make_run, programs, monkeypatch, capsys):
    logged(make_run())
    programs.write("jobs/7", "COMPLETED||None|\n")
    monkeypatch.setattr(command, "_ANNOUNCED_AFTER_S", 0.0)
    assert main(["logs", "-f", "gpt", "-n", "1"]) == 0
    out, err = capsys.readouterr()
    assert "-- lost: SLURM shows job 7 as completed" in out
    assert err == ""
