"""`slurmddp train -m`: a run for each point, a file that lists them, and commands that act on all of them."""

from __future__ import annotations

import json
import re

import pytest

import slurmddp
from slurmddp.cli.main import main
from slurmddp.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_NO_RUN,
    EXIT_RUN_STATE,
    EXIT_SLURM,
    EXIT_STOPPED,
    EXIT_USAGE,
    ConfigError,
    RunStateError,
    SlurmError,
)
from slurmddp.launchers.submit.array import shared_bound
from slurmddp.runs import sweeps
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.lock import RunLock
from slurmddp.slurm import client
from slurmddp.slurm.limits.partitions import Partition
from support.runs.cli_runs import end, start
from support.runs.train_runs import BIG
from support.slurm.slurm_in_memory import FakeSlurm

SEEDS = ("-m", "seed=range(1,4)", "name=first")


def sweep_of(project) -> sweeps.Sweep:
    (file,) = (project / "runs").glob("*.sweep")
    found = sweeps.find(file.stem)
    assert found is not None
    return found


def test_points_train_one_after_another_and_never_twice(project, here, capsys):
    assert main(["train", *SEEDS]) == EXIT_FINISHED
    sweep, shown = sweep_of(project), capsys.readouterr().out
    assert [run.config()["seed"] for run in sweep.runs] == [1, 2, 3]
    assert sweep.name.startswith("first-sweep-") and f"slurmddp list {sweep.name}" in shown
    assert f"point   2 of 3  {sweep.runs[1].name}  seed=2" in shown
    assert main(["train", *SEEDS]) == EXIT_FINISHED
    assert here.started == 3 and sweep_of(project).name == sweep.name
    assert main(["train", "seed=2", "name=first"]) == EXIT_FINISHED
    assert here.started == 3, "a point is the run of the same settings"
    assert main(["train", *SEEDS, "--again"]) == EXIT_FINISHED
    assert here.started == 6


@pytest.mark.parametrize("last", [EXIT_STOPPED, EXIT_INTERRUPTED])
def test_a_failure_is_told_and_only_a_person_ends_the_sweep(project, here, capsys, last):
    codes = iter([EXIT_FAILED, 0, last])
    here.ends = staticmethod(lambda: next(codes))
    assert main(["train", "-m", "seed=range(1,9)"]) == EXIT_FAILED
    assert here.started == 3 and "error: A rank failed." in capsys.readouterr().err
    assert len(sweep_of(project).started) == 3 and len(sweep_of(project).runs) == 8


def test_points_of_the_same_resources_are_one_array_and_one_command_acts_on_all(
    project, cluster, slurm, capsys, monkeypatch
):
    for module in ("control.listing", "control.status", "control.cancel", "control.report"):
        monkeypatch.setattr(f"slurmddp.{module}.SlurmClient", lambda: cluster)
    assert main(["train", *BIG, "-m", "seed=1,2", "nodes=1,2"]) == EXIT_FINISHED
    sweep = sweep_of(project)
    assert [one.script.split("--nodes=")[1][0] for one in cluster.submissions] == ["1", "2"]
    recorded = [run.events()[-1]["job_id"] for run in sweep.runs]
    assert recorded == ["1_0", "2_0", "1_1", "2_1"]
    for run, job_id in zip(sweep.runs, recorded, strict=True):
        assert set(cluster.jobs_of_each([run.path])[run.path]) == {job_id}
    assert main(["train", *BIG, "-m", "seed=1,2", "nodes=1,2"]) == EXIT_FINISHED
    assert len(cluster.submissions) == 2
    monkeypatch.chdir(project.parent)
    capsys.readouterr()
    for command in ("list", "status"):
        assert main([command, sweep.name]) == EXIT_FINISHED
        rows = capsys.readouterr().out.splitlines()
        assert len(rows) == 5 and all("queued" in row for row in rows[1:])
        assert "seed=1 nodes=2" in rows[2]
    assert main(["list", sweep.name[:-2], "--json"]) == EXIT_FINISHED
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["runs"]] == [
        run.name for run in sweep.runs
    ]
    assert main(["cancel", sweep.name]) == EXIT_FINISHED
    assert all(run.cancelled_file.exists() for run in sweep.runs)
    assert {state.state for state in cluster.states.values()} == {"CANCELLED"}
    assert main(["resume", sweep.name, "time_limit=01:00:00"]) == EXIT_FINISHED
    assert len(cluster.submissions) == 4 and "--array=0-1\n" in cluster.submissions[-1].script
    assert all("--time=01:00:00" in run.script_file.read_text() for run in sweep.runs)
    assert [run.events()[-1]["job_id"] for run in sweep.runs] == ["3_0", "4_0", "3_1", "4_1"]
    assert not any(run.cancelled_file.exists() for run in sweep.runs)
    capsys.readouterr()
    assert main(["report", sweep.name]) == EXIT_FINISHED
    assert capsys.readouterr().out == f"{sweep.report_file}\n"
    assert main(["open", sweep.name]) == EXIT_FINISHED
    assert capsys.readouterr().out == f"{sweep.report_file}\n"
    page = sweep.report_file.read_text()
    assert all(run.report_file.exists() and f'"{run.name}/report.html"' in page for run in sweep.runs)


def test_a_cancel_asks_slurm_once_for_all_runs_of_a_sweep(project, cluster, capsys, monkeypatch):
    monkeypatch.setattr("slurmddp.control.cancel.SlurmClient", lambda: cluster)
    main(["train", *BIG, "-m", "seed=range(1,6)"])
    sweep, asked, resubmitted = sweep_of(project), [], sweep_of(project).runs[3]
    cluster.set_state("1_1", "COMPLETED")
    start(sweep.runs[1], job_id="1_1")
    end(sweep.runs[1], "finished", job_id="1_1")

    def counting(name):
        really = getattr(cluster, name)

        def call(*given):
            asked.append((name, given))
            if name == "cancel" and len(given) == 4:  # A resubmission that began before the mark.
                resubmitted.add_event("submitted", job_id="9", submitter="sbatch", resubmitted=True)
                cluster.set_state("9", "PENDING")
            return really(*given)

        monkeypatch.setattr(cluster, name, call)

    for name in ("jobs", "jobs_of_each", "cancel"):
        counting(name)
    assert main(["cancel", sweep.name]) == EXIT_FINISHED
    shown = capsys.readouterr().out
    assert shown.count("is cancelled (job") == 5 and "has nothing to cancel: it is finished" in shown
    cancelled = [given for name, given in asked if name == "cancel"]
    assert cancelled == [("1_0", "1_2", "1_3", "1_4"), ("9",)] and len(asked) <= 8
    assert [run.cancelled_file.exists() for run in sweep.runs] == [True, False, True, True, True]
    assert main(["resume", sweep.name]) == EXIT_FINISHED
    cluster.silence = "Unable to contact slurm controller."
    assert main(["cancel", sweep.name]) == EXIT_SLURM
    told = capsys.readouterr().err
    assert "3 other runs are marked as cancelled and won't be requeued" in told
    assert "but job 1_0, 2_0, 1_2, 2_1, 1_3 and 4 others may still be in SLURM" in told


def test_the_points_of_an_array_are_printed_in_the_order_of_the_sweep(project, cluster, capsys):
    main(["train", *BIG, "-m", "seed=range(1,8)"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("point")]
    assert [line.split()[4] for line in lines] == [run.name for run in sweep_of(project).runs]


def test_a_stop_marks_all_runs_of_a_sweep_and_then_asks_slurm_once(project, cluster, capsys, monkeypatch):
    """An element that starts in the place of another one finds its mark, and the queue is asked for all."""
    monkeypatch.setattr("slurmddp.control.stop.SlurmClient", lambda: cluster)
    main(["train", *BIG, "-m", "seed=range(1,6)"])
    sweep, asked = sweep_of(project), []
    start(sweep.runs[0], job_id="1_0")
    cluster.set_state("1_0", "RUNNING")
    start(sweep.runs[1], job_id="1_1")
    end(sweep.runs[1], "finished", job_id="1_1")
    cluster.set_state("1_1", "COMPLETED")

    def counting(name):
        really = getattr(cluster, name)

        def call(*given):
            marked = [run.stop_file.exists() for run in sweep.runs]
            asked.append((name, given if name == "cancel" else (), marked))
            return really(*given)

        monkeypatch.setattr(cluster, name, call)

    for name in ("jobs", "jobs_of_each", "cancel"):
        counting(name)
    capsys.readouterr()
    assert main(["stop", sweep.name]) == EXIT_FINISHED
    shown = capsys.readouterr().out
    assert shown.count("was taken out of the queue") == 3 and shown.count("was asked to stop") == 1
    assert shown.count("has nothing to stop: it is finished") == 1
    assert shown.endswith(f"follow  slurmddp list {sweep.name}\nresume  slurmddp resume {sweep.name}\n")
    assert shown.count("follow") == 1 and len(asked) <= 5
    assert asked[-1] == ("cancel", ("1_2", "1_3", "1_4"), [True, False, True, True, True])
    assert cluster.states["1_0"].state == "RUNNING"


def test_map_array_submits_one_array_whose_runs_have_the_order_of_the_arguments(
    project, cluster, capsys, monkeypatch
):
    monkeypatch.setattr("slurmddp.control.cancel.SlurmClient", lambda: cluster)
    settings = {"cluster": "big", "nodes": 2, "array_parallelism": 2, "name": "power"}
    runs = slurmddp.map_array("math.pow", [3, 2, 3], iter([1.5, 2.5, 1.5]), **settings)
    sweep = sweep_of(project)
    assert [run.name for run in runs] == [sweep.runs[place].name for place in (0, 1, 0)]
    assert capsys.readouterr().out == "" and sweep.name.startswith("power-sweep-")
    assert "#SBATCH --array=0-1%2\n" in cluster.submissions[0].script
    assert [run.events()[-1]["job_id"] for run in sweep.runs] == ["1_0", "1_1"]
    assert [run.config()["program"]["args"][1:] for run in sweep.runs] == [
        ["math.pow", "[3, 1.5]"],
        ["math.pow", "[2, 2.5]"],
    ]
    assert {run.status().state for run in runs} == {"queued"}
    assert slurmddp.map_array("math.pow", [2], [2.5], **settings)[0].path == runs[1].path
    assert len(cluster.submissions) == 1, "the same point is never submitted twice"
    with pytest.raises(RunStateError, match="can't be renamed"):
        slurmddp.map_array("math.pow", [2], [2.5], again=True, **settings)
    runs[1].cancel()
    assert [cluster.states[job].state for job in ("1_0", "1_1")] == ["PENDING", "CANCELLED"]
    for wrong, reason in [
        (((1, 2), (3,)), "different lengths: the shortest one ends after 1 value"),
        (((1, {2}), (3, 4)), "can't be stored as text"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            slurmddp.map_array("math.pow", *wrong, **settings)
    assert slurmddp.map_array("math.pow", [], [], **settings) == [] and len(cluster.submissions) == 1


def test_the_name_of_the_runs_names_their_sweep_where_it_is_only_shown(project, here, capsys):
    main(["train", *SEEDS])
    sweep = sweep_of(project)
    ending = f"report  slurmddp report {sweep.name}\nsweep   slurmddp list {sweep.name}\n"
    assert capsys.readouterr().out.endswith(ending)
    for command in (["list", "first"], ["status", "first"]):
        assert main(command) == 0
        shown = capsys.readouterr().out
        assert all(run.name in shown for run in sweep.runs), command
    for command in ("report", "open"):
        assert main([command, "first"]) == 0
        assert str(sweep.report_file) in capsys.readouterr().out
    for command in ("cancel", "logs"):
        assert main([command, "first"]) == 66
        refused = capsys.readouterr().err
        assert "'first' matches 3 runs" in refused and f"The whole sweep is {sweep.name}." in refused
    assert main(["train", "name=second"]) == 0 and main(["report", "second"]) == 0
    assert "second-" in capsys.readouterr().out.splitlines()[-1]


def test_two_sweeps_whose_runs_have_one_name_are_both_named(project, here, capsys):
    main(["train", *SEEDS])
    main(["train", "-m", "name=first", "seed=7,8"])
    names = sorted(file.stem for file in (project / "runs").glob("*.sweep"))
    capsys.readouterr()
    for command in ("list", "status", "report", "open"):
        assert main([command, "first"]) == EXIT_NO_RUN
        refused = capsys.readouterr().err
        assert "'first' matches 2 sweeps: " in refused and all(f"/{name}" in refused for name in names)
    assert main(["cancel", "first"]) == EXIT_NO_RUN
    assert f"The whole sweeps are {names[0]}, {names[1]}." in capsys.readouterr().err


def test_a_stop_ends_the_resumption_of_a_sweep(project, here):
    here.ends = staticmethod(lambda: EXIT_FAILED)
    assert main(["train", *SEEDS]) == EXIT_FAILED and here.started == 3
    here.ends = staticmethod(lambda: EXIT_STOPPED)
    assert main(["resume", sweep_of(project).name]) == EXIT_STOPPED
    assert here.started == 4


def test_the_first_part_of_the_names_of_runs_is_not_the_sweep(project, here, capsys):
    main(["train", *SEEDS])
    assert main(["cancel", "first"]) == EXIT_NO_RUN
    assert "matches 3 runs" in capsys.readouterr().err


def test_the_runs_of_a_sweep_that_have_ended_resume_as_one_array(project, cluster, capsys):
    main(["train", *BIG, "-m", "seed=range(1,6)"])
    sweep = sweep_of(project)
    for place, (run, outcome) in enumerate(
        zip(sweep.runs, ("finished", "", "failed", "stopped"), strict=False)
    ):
        start(run, job_id=f"1_{place}")
        cluster.set_state(f"1_{place}", "COMPLETED" if outcome else "RUNNING")
        if outcome:
            end(run, outcome, job_id=f"1_{place}")
    capsys.readouterr()
    cluster.site = {"gpu": Partition(name="gpu", max_nodes=3)}
    assert main(["resume", sweep.name, "nodes=4"]) == EXIT_CONFIG
    assert "gives a job at most 3" in capsys.readouterr().err and len(cluster.submissions) == 1
    assert main(["resume", sweep.name, "array_parallelism=1"]) == EXIT_FINISHED
    shown, told = capsys.readouterr()
    assert f"sweep   {sweep.name}  (2 of 5 runs to resume)" in shown and "array   2  (2 jobs" in shown
    assert told.count("The changes were not applied") == 2 and told.count("has finished") == 1
    assert [one.script.count("#SBATCH --array=0-1%1\n") for one in cluster.submissions] == [0, 1]
    assert [run.events()[-1]["job_id"] for run in sweep.runs[2:]] == ["2_0", "2_1", "1_4"]
    fourth = sweep.runs[3].path
    assert set(cluster.jobs_of_each([fourth])[fourth]) == {"1_3", "2_1"}
    sweep.runs[4].config_file.unlink()
    assert main(["resume", sweep.name]) == EXIT_FINISHED
    shown, told = capsys.readouterr()
    assert len(cluster.submissions) == 2 and shown.count(" already: ") == 3
    assert "1 point without a run folder" in told


def test_rm_removes_a_sweep_its_runs_and_their_arrays_but_no_active_run(project, cluster, capsys):
    main(["train", *BIG, "-m", "seed=1,2", "nodes=1,2"])
    sweep, runs_dir = sweep_of(project), project / "runs"
    main(["train", *BIG, "-m", "seed=3,4", "nodes=1"])
    assert len([*runs_dir.glob(".*.[12]")]) == 3, "two arrays of the sweep, and one of another sweep"
    for job in ("1_0", "2_0", "2_1"):
        cluster.set_state(job, "FAILED")
    capsys.readouterr()
    assert main(["rm", sweep.name]) == EXIT_USAGE
    assert f"The sweep {sweep.name} and its 4 runs would be removed" in capsys.readouterr().err
    assert len(sweep.started) == 4
    assert main(["rm", sweep.name, "--yes"]) == EXIT_RUN_STATE
    assert "1 run of" in capsys.readouterr().err.splitlines()[-1] and sweep.file.exists()
    assert [run.path.name for run in sweep.started] == [sweep.runs[2].name]
    (kept,) = runs_dir.glob(f".{sweep.name}.[12]")
    assert (kept / "elements").read_text().splitlines()[1] == sweep.runs[2].name, (
        "the array of a run that is left"
    )
    cluster.set_state("1_1", "FAILED")
    assert main(["rm", sweep.name, "--yes"]) == EXIT_FINISHED
    assert not sweep.file.exists() and not [*runs_dir.glob(f".{sweep.name}.*")]
    assert len([*runs_dir.iterdir()]) == 4, "the two runs of the other sweep, its file and its array"


def test_rm_asks_slurm_once_for_all_runs_of_a_sweep_while_their_locks_are_held(
    project, cluster, capsys, monkeypatch
):
    main(["train", *BIG, "-m", "seed=range(1,6)"])
    sweep, asked = sweep_of(project), []
    for index in range(4):
        cluster.set_state(f"1_{index}", "FAILED")
    runs = sweep.runs

    def counting(name):
        really = getattr(cluster, name)

        def call(*given):
            asked.append((name, [RunLock(run).acquire() for run in runs]))
            return really(*given)

        monkeypatch.setattr(cluster, name, call)

    counting("jobs")
    counting("jobs_of_each")
    capsys.readouterr()
    assert main(["rm", sweep.name, "--yes"]) == EXIT_RUN_STATE
    assert asked == [("jobs", [False] * 5), ("jobs_of_each", [False] * 5)]
    shown, told = capsys.readouterr()
    assert shown.count(" is removed (") == 4 and f"slurmddp: {runs[4].name} is queued" in told
    assert [run.path.exists() for run in runs] == [False] * 4 + [True]


def test_runs_whose_state_forbids_a_command_are_passed_over(project, here, capsys):
    main(["train", *SEEDS])
    assert main(["resume", sweep_of(project).name]) == EXIT_FINISHED
    assert capsys.readouterr().err.count("has finished") == 3 and here.started == 3


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["time_limit=1h,2h"], "Two points of the sweep are the same run.*time_limit=1h, and time_limit=2h"),
        (["seed=1,1"], "Two points of the sweep are the same run.*big seed=1, and +cluster=big seed=1."),
        (["seed=1,x"], "`seed` is 'x'"),
        (["seed=1,2", "runs_dir=r${seed}"], "must be in one folder"),
        (["nodes=1,3"], "nodes=3.*partition 'gpu' gives a job at most 2"),
    ],
)
def test_a_sweep_is_refused_before_anything_is_queued(project, cluster, capsys, words, reason):
    cluster.site = {"gpu": Partition(name="gpu", max_nodes=2)}
    assert main(["train", "+cluster=big", "-m", *words]) == EXIT_CONFIG
    error = capsys.readouterr().err
    assert all(part in error for part in reason.split(".*"))
    assert not (project / "runs").exists() and not cluster.submissions


def test_a_sweep_that_slurm_refuses_in_the_middle_goes_on_by_the_same_command(project, cluster, capsys):
    really, words = cluster.submit, ["train", *BIG, "-m", "nodes=1,2", "seed=1,2"]

    def submit(*args, **options):
        cluster.refusal = "Job violates accounting policy" if len(cluster.submissions) == 1 else ""
        return really(*args, **options)

    cluster.submit = submit
    assert main([*words, "--json"]) == EXIT_SLURM
    sweep, printed = sweep_of(project), capsys.readouterr()
    assert "Job violates accounting policy" in printed.err and "2 points not started" in printed.err
    started = json.loads(printed.out)
    assert [run["name"] for run in started["runs"]] == [run.name for run in sweep.runs]
    queued, refused = started["runs"][:2], started["runs"][2:]
    assert all(run["outcome"] == "submitted" and run["job_id"] for run in queued)
    assert {(run["outcome"], run["exit_code"]) for run in refused} == {("refused", EXIT_SLURM)}
    assert all("Job violates accounting policy" in run["reason"] for run in refused)
    assert sweep.started == [run for run in sweep.runs if run.path.exists()] == list(sweep.runs[:2])
    assert len(list((project / "runs").glob(".*"))) == 1
    cluster.submit = really
    cluster.refusal = ""
    assert main(["list", sweep.name]) == EXIT_FINISHED
    assert "2 of 4 points have no run folder" in capsys.readouterr().err
    assert main(words) == EXIT_FINISHED
    assert len(cluster.submissions) == 2 and len(sweep.started) == 4


def finish(cluster, folder: RunFolder) -> None:
    job_id = folder.events()[-1]["job_id"]
    start(folder, job_id=job_id)
    end(folder, "finished", job_id=job_id)
    cluster.set_state(job_id, "COMPLETED")


@pytest.mark.parametrize("points", [["seed=1"], ["-m", "seed=1,2"]])
def test_runs_that_slurm_does_not_start_again_stay_what_they_were(project, cluster, capsys, points):
    again = ["train", *BIG, *points, "--again"]
    assert main(again) == EXIT_FINISHED
    runs = [RunFolder(path.parent) for path in (project / "runs").glob("first-*/config.yaml")]
    for run in runs:
        finish(cluster, run)
    before = sorted((project / "runs").iterdir())
    cluster.refusal = "Invalid account"
    assert main(again) == EXIT_SLURM
    assert "is kept as" not in capsys.readouterr().out
    assert sorted((project / "runs").iterdir()) == before
    assert {run.events()[-1]["outcome"] for run in runs} == {"finished"}
    cluster.refusal = ""
    assert main(again) == EXIT_FINISHED
    assert capsys.readouterr().out.count("is kept as") == len(runs)


def test_an_active_run_of_a_sweep_lets_no_other_one_be_put_aside(project, cluster, capsys):
    words = ["train", *BIG, "-m", "seed=1,2"]
    assert main(words) == EXIT_FINISHED
    finished, _ = sorted(sweep_of(project).runs, key=lambda run: run.name)
    finish(cluster, finished)
    before = sorted((project / "runs").iterdir())
    assert main([*words, "--again"]) == EXIT_RUN_STATE
    assert "The folder of an active run can't be renamed; nothing was changed" in capsys.readouterr().err
    assert sorted((project / "runs").iterdir()) == before
    assert finished.events()[-1]["outcome"] == "finished"


def test_an_array_whose_answer_was_lost_is_found_and_not_submitted_again(project, cluster, capsys):
    really, words = cluster.submit, ["train", *BIG, "-m", "seed=1,2,3", "array_parallelism=2"]

    def submit(*args, **options):
        really(*args, **options)
        error = SlurmError("sbatch gave no answer.")
        error.may_be_queued = True
        raise error

    cluster.submit = submit
    assert main(words) == EXIT_SLURM
    sweep = sweep_of(project)
    assert len(sweep.started) == 3 and "--array=0-2%2\n" in cluster.submissions[0].script
    cluster.submit = really
    assert main(words) == EXIT_FINISHED
    assert capsys.readouterr().out.count("which the run folder did not record") == 3
    assert [run.events()[-1]["job_id"] for run in sweep.runs] == ["1_0", "1_1", "1_2"]
    assert main(words) == EXIT_FINISHED
    assert len(cluster.submissions) == 1


def test_the_arrays_of_a_sweep_share_the_bound_on_points_at_once(project, cluster):
    cluster.largest_array = 3
    assert main(["train", *BIG, "-m", "seed=range(1,8)", "array_parallelism=5"]) == EXIT_FINISHED
    arrays = [re.search("--array=(.*)\n", sent.script) for sent in cluster.submissions]
    assert [found and found[1] for found in arrays] == ["0-2%2", "0-2%2", None], "and a job of its own"


@pytest.mark.parametrize(
    ("words", "bounds"),
    [
        (["resume", "{sweep}", "train.steps=900", "array_parallelism=4"], ["0-2%2", "0-2%2"]),
        (["train", *BIG, "-m", "seed=range(1,7)", "array_parallelism=4"], ["0-2%3"]),
    ],
    ids=["extended", "left alone"],
)
def test_finished_points_count_for_the_bound_if_they_are_extended(project, cluster, words, bounds):
    cluster.largest_array = 3
    assert main(["train", *BIG, "-m", "seed=range(1,7)"]) == EXIT_FINISHED
    sweep = sweep_of(project)
    for place, run in enumerate(sweep.runs):
        job_id = f"{place // 3 + 1}_{place % 3}"
        outcome = "finished" if place < 3 else "stopped"
        start(run, job_id=job_id)
        end(run, outcome, job_id=job_id)
        cluster.set_state(job_id, "COMPLETED")
    assert main([word.format(sweep=sweep.name) for word in words]) == EXIT_FINISHED
    arrays = [re.search("--array=(.*)\n", sent.script) for sent in cluster.submissions[2:]]
    assert [found and found[1] for found in arrays] == bounds


@pytest.mark.parametrize(
    ("bound", "sizes", "shares"),
    [
        (4, [20, 5], [3, 1]),
        (8, [20, 5], [6, 2]),
        (99, [20, 5], [20, 5]),
        (3, [4, 4, 4], [1, 1, 1]),
        (4, [0, 9], [1, 4]),  # all points of the first have finished
        (1, [20, 5], [1, 1]),  # SLURM has no array that runs nothing
    ],
)
def test_arrays_get_shares_of_a_bound_by_their_sizes(bound, sizes, shares):
    assert shared_bound(bound, sizes) == shares


def test_an_array_has_the_points_that_are_left_and_as_many_as_slurm_allows(project, cluster, capsys):
    cluster.largest_array = 2
    assert main(["train", *BIG, "seed=2"]) == EXIT_FINISHED
    assert main(["train", *BIG, "-m", "seed=range(1,6)"]) == EXIT_FINISHED
    runs = sweep_of(project).runs
    assert [run.events()[-1]["job_id"] for run in runs] == ["2_0", "1", "3_0", "3_1", "4"]
    assert all(RunLock(run).acquire() for run in runs), "the locks of all points are free again"
    assert main(["train", *BIG, "-m", "seed=6,7", "submitter=submitit", "--dry-run"]) == EXIT_FINISHED
    assert "--array" not in capsys.readouterr().out, "submitit submits one job for each point"


def test_each_run_of_an_array_has_a_script_and_settings_of_its_own(project, cluster):
    assert main(["train", "+cluster=big", "-m", "name=a,b", "seed=1,2"]) == EXIT_FINISHED
    assert len(cluster.submissions) == 1
    array = cluster.submissions[0].path.parent
    runs = sweep_of(project).runs
    assert (array / "elements").read_text().split() == [run.name for run in runs]
    for run in runs:
        assert run.name in run.script_file.read_text() and run.name in run.job_file.read_text()
        assert not run.batch_file.exists(), "it comes with the code, at the first start"
    assert (array / "element/job.pyz").is_file()


def test_a_dry_run_prints_the_points_and_the_scripts(project, capsys):
    assert main(["train", *BIG, "-m", "seed=1,2", "--dry-run"]) == EXIT_FINISHED
    shown = capsys.readouterr().out
    assert "# 1" in shown and "seed=2" in shown and shown.count("#!/bin/bash") == 2
    assert "#SBATCH --array=0-1\n" in shown and 'job.sbatch" element' in shown
    assert main(["train", *BIG, "-m", "seed=1,2", "--cfg", "-p", "seed"]) == EXIT_FINISHED
    documents = capsys.readouterr().out.split("---\n")[1:]
    assert [document.splitlines()[-1] for document in documents] == ["1", "2"]
    assert not (project / "runs").exists()


def test_the_settings_of_a_script_are_swept_and_its_arguments_stay(project, here, capsys):
    (project / "fit.py").write_text("")
    assert main(["run", "--multirun", "seed=1,2", "fit.py", "--lr", "1,2", "-m"]) == EXIT_FINISHED
    assert [run.config()["program"]["args"] for run in sweep_of(project).runs] == [["--lr", "1,2", "-m"]] * 2


@pytest.mark.parametrize("command", ["explain", "logs", "rerun", "checkpoints", "export"])
def test_a_command_that_takes_one_run_says_that_it_got_a_sweep(project, here, capsys, command):
    main(["train", *SEEDS])
    sweep = sweep_of(project).name
    assert main([command, sweep[:-2]]) == EXIT_NO_RUN
    told = capsys.readouterr().err
    assert "is a sweep, and this command takes one run" in told and f"`slurmddp list {sweep}`" in told


def test_a_name_that_is_no_sweep_is_told_with_near_ones(project, here, capsys):
    assert main(["list", "first-sweep"]) == EXIT_NO_RUN
    assert "slurmddp train -m" in capsys.readouterr().err
    main(["train", *SEEDS])
    main(["train", "-m", "seed=7,8", "name=first"])
    assert main(["list", "first-swep"]) == EXIT_NO_RUN
    assert "Did you mean first-sweep-" in capsys.readouterr().err
    assert main(["cancel", "first-sweep"]) == EXIT_NO_RUN
    assert "matches 2 sweeps" in capsys.readouterr().err


def test_a_sweep_of_several_names_has_none_of_them(project, here):
    assert main(["train", "-m", "name=one,two"]) == EXIT_FINISHED
    assert sweep_of(project).name.startswith("sweep-")
    assert {RunFolder(run.path).name.partition("-")[0] for run in sweep_of(project).runs} == {"one", "two"}


def test_a_dry_run_shows_whole_arrays_where_slurm_has_no_controller(project, capsys, monkeypatch):
    silent = FakeSlurm(silence="scontrol failed: Could not establish a configuration source.")
    monkeypatch.setattr(client, "SlurmClient", lambda **_: silent)
    monkeypatch.setattr(client, "on_path", lambda: True)
    assert main(["train", *BIG, "-m", "seed=1,2,3", "--dry-run"]) == EXIT_FINISHED
    shown = capsys.readouterr()
    assert "#SBATCH --array=0-2" in shown.out and "Could not establish a configuration source" in shown.err
