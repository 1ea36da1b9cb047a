"""A number in a text key is refused if YAML or Hydra has changed its spelling."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.config.composition.compose import compose
from slurmddp.errors import ConfigError
from support.runs.projects import make_project

CLUSTER = "name: mine\nranks_per_node: 1\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project")


def write(project: Path, name: str, text: str) -> None:
    path = project / "conf" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "typed", "written"),
    [
        ("slurmddp.yaml", "time_limit: 24:00:00\n", [], "24:00:00"),
        (
            "experiment/long.yaml",
            "# @package _global_\ntime_limit: 12:00:00\n",
            ["experiment=long"],
            "12:00:00",
        ),
        ("slurmddp.yaml", "{seed: 1, time_limit: 12:00:00}\n", [], "12:00:00"),
        ("slurmddp.yaml", "train:\n  max_time: 2:30:00  # half a night\n", [], "2:30:00"),
        ("cluster/mine.yaml", f"{CLUSTER}sbatch: {{time-min: 4:00:00}}\n", [], "4:00:00"),
        ("cluster/mine.yaml", f"{CLUSTER}sbatch:\n  begin: 16:00\n", [], "16:00"),
        ("cluster/mine.yaml", f"{CLUSTER}sbatch: {{wckey: 007}}\n", [], "007"),
        ("cluster/mine.yaml", f"{CLUSTER}account: 012345\n", [], "012345"),
        ("cluster/mine.yaml", f"{CLUSTER}env: {{VERSION: 12.10}}\n", [], "12.10"),
        ("cluster/mine.yaml", f'{CLUSTER}env:\n  "N": 010\n', [], "010"),
        ("cluster/mine.yaml", f"{CLUSTER}srun: {{immediate: 1:00}}\n", [], "1:00"),
        ("cluster/mine.yaml", CLUSTER, ["+cluster.env.VERSION=12.10"], "12.10"),
        ("cluster/mine.yaml", CLUSTER, ["+cluster.env={VERSION: 12.10}"], "12.10"),
        ("slurmddp.yaml", "program: {script: gpu.py, args: [--at, 12:00:00]}\n", [], "12:00:00"),
        ("slurmddp.yaml", "program:\n  script: gpu.py\n  args:\n  - 1.10\n", [], "1.10"),
        ("slurmddp.yaml", "program: {script: gpu.py, args: [--amp, yes]}\n", [], "yes"),
        ("slurmddp.yaml", "program:\n  script: gpu.py\n  args:\n  - --amp\n  - Off\n", [], "Off"),
        ("cluster/mine.yaml", f"defaults: [base]\n{CLUSTER}", [], "012345"),
        ("cluster/mine.yaml", f"defaults:\n- /cluster/middle@_here_\n{CLUSTER}", [], "012345"),
        ("cluster/mine.yaml", f"{CLUSTER}account: &it 0123\nsbatch: {{wckey: *it}}\n", [], "0123"),
        ("cluster/mine.yaml", f"{CLUSTER}sbatch: {{nice: &it 0123}}\naccount: *it\n", [], "0123"),
        ("slurmddp.yaml", "project: 0x1F\naccount: ${project}\n", [], "0x1F"),
    ],
)
def test_a_number_that_was_written_otherwise_is_refused(
    project: Path, name: str, text: str, typed: list[str], written: str
) -> None:
    write(project, "cluster/mine.yaml", CLUSTER)
    write(project, "cluster/base.yaml", "account: 012345\n")
    write(project, "cluster/middle.yaml", "defaults: [base]\n")
    write(project, name, text)
    (project / "gpu.py").touch()
    with pytest.raises(ConfigError) as caught:
        compose(["+cluster=mine", *typed], project)
    assert f"{written} without quotes" in caught.value.message and f'"{written}"' in caught.value.hint
    assert ("The command line" if typed and "=" in typed[0] and "{" in text + typed[0] else "") in str(
        caught.value
    )


@pytest.mark.parametrize(
    "typed",
    ["+experiment=long", "experiment=long", "+experiment=[long]", "+experiment@_global_=long"],
)
def test_the_error_names_the_file_that_is_chosen(project: Path, typed: str) -> None:
    for name in ("early", "long", "other"):
        write(project, f"experiment/{name}.yaml", "# @package _global_\ntime_limit: 12:00:00\n")
    with pytest.raises(ConfigError, match=r"experiment/long\.yaml holds time_limit: 12:00:00"):
        compose([typed], project)


@pytest.mark.parametrize(
    ("text", "typed", "account"),
    [
        (
            "time_limit: 90\naccount: 5349\nenv: {N: 8, X: 1.5}\nsbatch: {nice: 100, begin: '16:00'}\n",
            [],
            "5349",
        ),
        ('time_limit: "12:00:00"\naccount: "012345"\n', ["time_limit=06:00:00", "account=007"], "007"),
        ("time_limit: 1_000\n", ["train.steps=1_000", "optimizer.lr=1.50e-3"], None),
        ("time_limit: 3600\n", [], None),
        ("defaults: [base]\nsbatch: {nice: 31}\n", ["+project=31", "account=${project}"], "31"),
    ],
)
def test_numbers_that_are_what_was_written_pass(
    project: Path, text: str, typed: list[str], account: str | None
) -> None:
    write(project, "cluster/mine.yaml", CLUSTER + text)
    write(project, "cluster/other.yaml", "time_limit: 1:00:00\naccount: 0x1F\n")
    write(project, "cluster/base.yaml", "mem_gb: 0x1F\n")
    config = compose(["+cluster=mine", *typed], project)
    assert (config["account"] or config["cluster"].get("account")) == account
