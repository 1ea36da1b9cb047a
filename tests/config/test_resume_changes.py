"""The job of an existing run: the same computation, at another place or size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from slurmddp.config.resume_changes import free_keys, job_of_run
from slurmddp.errors import ConfigError
from slurmddp.runs.folder.layout import RunFolder
from support.runs.projects import job_of

TYPED = {
    "program.free_args": ("--log 'b c'", ["--log", "b c"]),
    "program.resume_args": ("--from=last 'b c'", ["--from=last", "b c"]),
    "program.resumable": ("true", True),
    "program.checkpoints": ("out/*.pt", "out/*.pt"),
    "train.on_spike": ("rollback", "rollback"),
    "train.flops": ("true", True),
    "train.best": ("eval_loss", "eval_loss"),
}


@pytest.mark.parametrize("key", [key for key in free_keys() if "." in key])
def test_a_run_that_goes_on_may_change_what_changes_no_number(project: Path, key: str) -> None:
    section, _, name = key.partition(".")
    given = "program.script=mine.py" if section == "program" else "seed=0"
    (project / "mine.py").touch()
    run = prepared(project, given)
    typed, stored = TYPED.get(key, ("3", 3))
    again = job_of_run(run, [f"{key}={typed}"])
    assert again.program.config[section][name] == stored


def prepared(project: Path, *overrides: str) -> RunFolder:
    job = job_of(project, *overrides)
    folder = RunFolder(job.run_dir)
    folder.path.mkdir(parents=True)
    folder.config_file.write_text(yaml.safe_dump(dict(job.program.config), sort_keys=False))
    folder.overrides_file.write_text("".join(f"'{word}'\n" for word in overrides))
    return folder


def test_a_run_gives_its_job_back(project: Path) -> None:
    overrides = ["+cluster=big", "nodes=2", "name=a", "+model.note='two words'"]
    folder = prepared(project, *overrides)
    again, first = job_of_run(folder), job_of(project, *overrides)
    assert json.dumps(again.program.config) == json.dumps(first.program.config)
    for field in ("run_dir", "run_name", "resources", "cluster", "project_dir"):
        assert getattr(again, field) == getattr(first, field), field


def test_a_run_of_an_earlier_version_that_names_torchrun_starts_its_script_by_the_agents(
    project: Path,
) -> None:
    (project / "mine.py").touch()
    folder = prepared(project, "program.script=mine.py", "program.resumable=true")
    with folder.overrides_file.open("a") as file:
        file.write("program.torchrun=true\n")
    stored = yaml.safe_load(folder.config_file.read_text())
    stored["program"]["torchrun"] = True
    folder.config_file.write_text(yaml.safe_dump(stored))
    again = job_of_run(folder)
    assert again.run_dir == folder.path
    assert again.program.config["program"] == {
        name: value for name, value in stored["program"].items() if name != "torchrun"
    }


def test_a_run_keeps_its_folder_when_slurmddp_would_name_it_otherwise(project: Path) -> None:
    folder = prepared(project)
    moved = folder.path.with_name("gpt-00000000.old-1")
    folder.path.rename(moved)
    assert job_of_run(RunFolder(moved)).run_dir == moved


@pytest.mark.parametrize(
    ("settings", "change", "words"),
    [
        ((), "digits", "'digits' is not a setting. Settings are written KEY=VALUE"),
        ((), "seed=3", "would change the results of .*; .*`slurmddp rerun {name} seed=3` starts a new run"),
        (("program.script=train.py",), "seed=3", "`slurmddp rerun {name} seed=3` starts a new run"),
    ],
)
def test_a_change_that_a_run_can_not_take_names_the_command_for_a_new_run(
    project: Path, settings: tuple[str, ...], change: str, words: str
) -> None:
    (project / "train.py").touch()
    folder = prepared(project, *settings)
    with pytest.raises(ConfigError, match=words.format(name=folder.name)) as refused:
        job_of_run(folder, [change])
    assert ("train.save_every" in str(refused.value)) is (change == "seed=3" and not settings)


def test_a_run_goes_on_elsewhere_and_longer(project: Path) -> None:
    folder = prepared(project, "+cluster=big", "gpus_per_node=2")
    changes = ["time_limit=2-00:00:00", "partition=long", "policy.max_restarts=9", "cluster.qos=night"]
    job = job_of_run(folder, changes)
    assert job.resources.time_limit_min == 2880
    assert (job.cluster.partition, job.cluster.qos, job.policy.max_restarts) == ("long", "night", 9)
    assert job.overrides == ("+cluster=big", "gpus_per_node=2", *changes)
    moved = job_of_run(folder, ["cluster=h100x8", "+cluster.env.A=1"])
    assert moved.overrides == ("gpus_per_node=2", "cluster=h100x8", "+cluster.env.A=1")
    assert (moved.cluster.name, moved.resources.gpus_per_node) == ("h100x8", 2)
    assert job_of_run(folder, ["launcher=local"]).launcher == "local"


def test_a_run_that_is_older_than_some_keys_goes_on_with_their_defaults(project: Path) -> None:
    folder = prepared(project, "+cluster=big")
    older = folder.config()
    for section, names in ((older, ("spare_nodes", "elastic", "preflight")), (older["policy"], ("grace_s",))):
        for key in names:
            del section[key]
    del older["train"]["memory_save_every"]
    older["train"]["steps"] = 77
    folder.config_file.write_text(yaml.safe_dump(older, sort_keys=False))
    job = job_of_run(folder, ["spare_nodes=1", "train.memory_save_every=5"])
    assert (job.resources.spare_nodes, job.elastic) == (1, False)
    assert [job.program.config["train"][key] for key in ("steps", "memory_save_every")] == [77, 5]


def test_a_run_goes_on_at_another_size_with_the_same_steps(project: Path) -> None:
    folder = prepared(project, "+cluster=big", "nodes=4", "train.accumulate=2")
    assert folder.config()["train"]["global_batch"] is None
    job = job_of_run(folder, ["nodes=2", "gpus_per_node=4"])
    assert (job.resources.nodes, job.resources.ranks_per_node, job.resources.gpus_per_node) == (2, 4, 4)
    assert job.run_dir == folder.path
    assert job.program.config["train"]["global_batch"] == 16 * 2 * 32
    assert [job.program.config["train"][key] for key in ("batch_size", "accumulate")] == [16, 2]
    folder.config_file.write_text(yaml.safe_dump(dict(job.program.config), sort_keys=False))
    again = job_of_run(folder, ["nodes=1", "ranks_per_node=1"])
    assert (again.resources.ranks_per_node, again.resources.gpus_per_node) == (1, 1)
    assert again.program.config["train"]["global_batch"] == 1024


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.batch_size=9", "would change the results of gpt-.*starts a new run"),
        ("train.steps=9", "train.steps=9 does not extend gpt-.* is 400.*Give more than 400.*rerun"),
        ("nodes=3", r"128 samples.*24 ranks.*Numbers of ranks that work: 1, 2, 4, 8, 16, 32, 64, 128"),
        ("name=x", "would change the results of"),
        ("~policy", "would change the results of"),
        ("time_limit", "no value"),
        ("time_limit=soon", "not a time"),
        ("policy.max_restart=1", "Did you mean policy.max_restarts"),
        ("cluster=h100", "no cluster 'h100'"),
        ("cluster=small", "more than a node of cluster small has"),
        ("account=a;b", "can't be read"),
    ],
)
def test_a_run_that_goes_on_computes_the_same(project: Path, change: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job_of_run(prepared(project, "+cluster=big"), [change])


def test_t13_a_run_resumes_on_another_number_of_gpus(project: Path) -> None:
    run = prepared(project, "+cluster=big", "gpus=24")
    again = job_of_run(run, ["gpus=8"])
    assert (again.resources.nodes, again.resources.gpus_per_node) == (1, 8)
    assert again.program.config["train"]["global_batch"] == 16 * 24
    assert job_of_run(run, ["nodes=2"]).resources.world_size == 16
    assert job_of_run(run, ["gpus=8", "nodes=2"]).resources.gpus_per_node == 4
