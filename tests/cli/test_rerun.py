"""`slurmddp rerun`: the words of a run once more, under a name of its own."""

from __future__ import annotations

from pathlib import Path

from slurmddp.cli.main import main
from slurmddp.control.rerun import command_again
from slurmddp.errors import EXIT_CONFIG
from slurmddp.runs.folder.layout import RunFolder


def runs_of(project: Path) -> dict[str, RunFolder]:
    return {path.name.rpartition("-")[0]: RunFolder(path) for path in (project / "runs").iterdir()}


def test_a_rerun_is_a_new_run_with_the_same_settings(project, cluster, tmp_path, monkeypatch, capsys):
    assert main(["train", "+cluster=big", "nodes=3", "name=first", "optimizer.betas=[0.8, 0.9]"]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["rerun", "first"]) == 0
    assert main(["rerun", "first", "seed=1"]) == 0
    assert main(["rerun", "first-rerun-2"]) == 0
    configs = {name: folder.config() for name, folder in runs_of(project).items()}
    assert sorted(configs) == ["first", "first-rerun", "first-rerun-2", "first-rerun-3"]
    again, other, third = (configs[f"first-rerun{end}"] for end in ("", "-2", "-3"))
    assert {**configs["first"], "name": "first-rerun"} == again
    assert {**again, "name": "first-rerun-2", "seed": 1} == other
    assert third["seed"] == 1, "the words of the second run are those of its own command"
    assert len(cluster.submissions) == 4


def test_a_rerun_of_a_script_keeps_its_arguments(project, cluster, capsys):
    (project / "mine.py").write_text("")
    arguments = ["--lr", "1e-3", "a b", "{x}=$HOME"]
    assert main(["run", "+cluster=small", "name=first", "mine.py", *arguments]) == 0
    assert main(["rerun", "first", "--cfg"]) == 0
    assert main(["rerun", "first"]) == 0
    runs = runs_of(project)
    assert runs["first-rerun"].config()["program"]["args"] == arguments
    assert command_again("first-rerun") == command_again(str(runs["first"].path))


def test_a_project_that_is_gone_is_told(project, cluster, tmp_path, monkeypatch, capsys):
    assert main(["train", "+cluster=big", "name=first", f"runs_dir={tmp_path / 'runs'}"]) == 0
    monkeypatch.chdir(tmp_path)
    project.rename(tmp_path / "moved")
    assert main(["rerun", "first"]) == EXIT_CONFIG
    assert "does not exist any more" in capsys.readouterr().err
