"""A plan shows what a start would do; its id changes with the settings and with the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmddp.cli.main import main
from slurmddp.control.json_encoding import from_json, json_value
from slurmddp.control.plan import StartPlan, plan, plan_id, refuse_changed_plan
from slurmddp.control.points import plan_points, points_of_settings, start_planned
from slurmddp.errors import ConfigError, RunStateError
from support.runs.projects import job_of, make_project

SETTINGS = ("+cluster=big", "nodes=2")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_project(tmp_path / "project")
    (folder / "my_model.py").write_text("first = 1\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", "")
    return folder


def test_a_dry_run_with_json_is_the_plan(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--json", *SETTINGS]) == 0
    planned = from_json(StartPlan, json.loads(capsys.readouterr().out))
    assert planned == plan([job_of(project, *SETTINGS)], with_id=True)
    assert planned.cluster == "big" and planned.resources.world_size == 16
    assert planned.script.startswith("#!/bin/bash\n") and "#SBATCH --partition=gpu" in planned.chosen_lines
    assert [run.exists for run in planned.runs] == [False] and not (project / "runs").exists()
    planned.runs[0].path.mkdir(parents=True)
    assert plan([job_of(project, *SETTINGS)]).runs[0].exists


def test_a_sweep_has_its_points_and_arrays(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-m", "--dry-run", "--json", *SETTINGS, "seed=1,2"]) == 0
    planned = from_json(StartPlan, json.loads(capsys.readouterr().out))
    assert [run.settings for run in planned.runs] == ["seed=1", "seed=2"]
    assert planned.sweep and len(planned.arrays) == 1 and "#SBATCH --array=0-1" in planned.arrays[0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda project: None, ""),
        (lambda project: (project / "my_model.py").write_text("first = 2\n"), "the code"),
        (lambda project: (project / "new.py").touch(), "the code"),
        (
            lambda project: (project / "conf/optimizer/adamw.yaml").write_text(
                "_target_: torch.optim.SGD\nlr: 1\n"
            ),
            "the settings or configuration files",
        ),
    ],
)
def test_an_id_holds_until_settings_or_code_change(project: Path, change, named: str) -> None:
    planned = plan_id([job_of(project, *SETTINGS)])
    assert planned == plan_id([job_of(project, *SETTINGS)])
    change(project)
    if not named:
        refuse_changed_plan(planned, [job_of(project, *SETTINGS)])
        return
    with pytest.raises(
        RunStateError, match=f"out of date: {named} differ from the plan. Nothing was started."
    ):
        refuse_changed_plan(planned, [job_of(project, *SETTINGS)])


def test_other_settings_are_another_plan(project: Path) -> None:
    planned = plan_id([job_of(project, *SETTINGS)])
    for settings in ([*SETTINGS, "seed=1"], ["+cluster=big", "nodes=3"], [*SETTINGS, "time_limit=1:00:00"]):
        with pytest.raises(RunStateError):
            start_planned([settings], planned, is_sweep=False)
    assert not (project / "runs").exists()


def test_a_plan_for_others_shows_no_value_that_may_be_a_secret(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    reference = "${oc.env:SECRET}"
    settings = [
        *("+cluster=big", f"+cluster.env.TOKEN={reference}", "+cluster.env.PLAIN=visible"),
        *(
            f"cluster.setup=['export KEY={reference}',module load cuda]",
            f"+cluster.sbatch.comment={reference}",
        ),
    ]
    planned = plan_points([settings], is_sweep=False)
    assert planned.id == plan_id([job_of(project, *settings)])
    text = json.dumps(json_value(planned))
    assert "hunter2" not in text and "visible" not in text
    assert "module load cuda" in planned.script and "export TOKEN=" in planned.script
    points = [[*settings, f"seed={seed}", f"+cluster.env.SEED=word{seed}"] for seed in (1, 2)]
    assert "word" not in json.dumps(json_value(plan_points(points, is_sweep=True)))
    assert "hunter2" in plan([job_of(project, *settings)]).script


def test_what_would_wait_for_its_end_is_refused(project: Path) -> None:
    with pytest.raises(ConfigError, match="a search, which waits"):
        points_of_settings(["hydra/sweeper=optuna", "seed=1,2"])
    points = points_of_settings(["seed=1,2"], is_sweep=True)
    planned = plan_id([job_of(project, *point) for point in points])
    with pytest.raises(ConfigError, match="one after another"):
        start_planned(points, planned, is_sweep=True)
    assert not (project / "runs").exists()


def test_arguments_of_a_program_may_refer_to_own_keys(project: Path) -> None:
    (project / "train.sh").touch(mode=0o755)
    (point,) = points_of_settings(["+lr=0.5"], ["./train.sh", "--lr", "${lr}", "a,b"])
    assert job_of(project, *point).program.config["program"]["args"] == ["--lr", "0.5", "a,b"]
