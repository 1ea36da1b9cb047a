"""The text of the batch script; what it does when bash runs it is in test_batch_script."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmddp.errors import ConfigError
from slurmddp.settings.schema import Cluster
from slurmddp.settings.spec import Job
from slurmddp.slurm.sbatch_options import sbatch_options
from slurmddp.slurm.script import render
from slurmddp.slurm.units import parse_minutes
from support import ROOT
from support.slurm.slurm_jobs import make_job, options_in

GOLDEN = ROOT / "tests/golden"
REWRITE = "SLURMDDP_REWRITE_GOLDEN"
CLUSTERS = ("a100x8", "h100x8", "cpu", "sandbox")


def shipped(name: str) -> Cluster:
    values = yaml.safe_load((ROOT / "slurmddp/conf/cluster" / f"{name}.yaml").read_text())
    known = {field.name for field in fields(Cluster)}
    assert set(values) <= known, f"not fields of Cluster: {sorted(set(values) - known)}"
    values["setup"] = tuple(values.get("setup") or ())
    return Cluster(**values)


def job_on(name: str) -> Job:
    cluster = shipped(name)
    gpus = cluster.gpus_per_node
    return make_job(
        cluster,
        gpus_per_node=gpus,
        ranks_per_node=gpus or cluster.ranks_per_node,
        cpus_per_node=cluster.cpus_per_node,
        mem_gb=cluster.mem_gb,
        time_limit_min=parse_minutes(cluster.time_limit) if cluster.time_limit else None,
    )


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_script_of_a_shipped_cluster_is_the_golden_one(name: str) -> None:
    """To accept a change, run this test with SLURMDDP_REWRITE_GOLDEN=1 and read the difference."""
    golden, text = GOLDEN / f"{name}.sbatch", render(job_on(name))
    if os.environ.get(REWRITE) == "1":
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_script_is_plain_readable_text(name: str) -> None:
    text = render(job_on(name))
    assert text.isascii()
    assert len(text.splitlines()) <= 60, "one screen"
    assert not [line for line in text.splitlines() if len(line) > 120 or line != line.rstrip()]


def test_the_same_job_gives_the_same_bytes() -> None:
    first = make_job(env={"B": "2", "A": "1"}, sbatch={"nice": 5, "exclusive": True})
    second = make_job(env={"A": "1", "B": "2"}, sbatch={"exclusive": True, "nice": 5})
    assert render(first) == render(second)


def header(job: Job) -> list[str]:
    return [option.removeprefix("--") for option in options_in(render(job))]


def test_nothing_is_asked_for_that_was_not_set() -> None:
    assert header(make_job()) == [
        "job-name=gpt-0123abcd",
        "nodes=2",
        "ntasks=2",
        "ntasks-per-node=1",
        "open-mode=append",
        "output=/home/ada/project/runs/gpt-0123abcd/logs/slurm-%j.out",
        "requeue",
        "signal=USR2@120",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"gpus_per_node": 4}, "gpus-per-node=4"),
        ({"gpus_per_node": 4, "gpu_type": "a100"}, "gpus-per-node=a100:4"),
        ({"gpus_per_node": 4, "gpu_request": "gres"}, "gres=gpu:4"),
        ({"gpus_per_node": 4, "gpu_request": "gres", "gpu_type": "a100"}, "gres=gpu:a100:4"),
        ({"mem_gb": 0}, "mem=0"),
        ({"mem_gb": 64}, "mem=65536M"),
        ({"mem_gb": 1.5}, "mem=1536M"),
        ({"mem_gb": 10, "mem_request": "mem-per-cpu", "cpus_per_node": 3}, "mem-per-cpu=3414M"),
        ({"mem_gb": 10, "mem_request": "mem-per-gpu", "gpus_per_node": 4}, "mem-per-gpu=2560M"),
        ({"cpus_per_node": 16}, "cpus-per-task=16"),
        ({"time_limit_min": 90}, "time=01:30:00"),
        ({"partition": "a,b"}, "partition=a,b"),
        ({"account": "proj"}, "account=proj"),
        ({"qos": "long"}, "qos=long"),
        ({"constraint": "a100&nvlink"}, "constraint=a100&nvlink"),
        ({"reservation": "course"}, "reservation=course"),
        ({"requeue": False}, "no-requeue"),
        ({"signal_lead_s": 30}, "signal=USR2@30"),
        ({"sbatch": {"exclusive": True}}, "exclusive"),
        ({"sbatch": {"mail_type": "END"}}, "mail-type=END"),
        ({"sbatch": {"licenses": "matlab:1"}}, "licenses=matlab:1"),
        ({"sbatch": {"switches": "1@10:00"}}, "switches=1@10:00"),
        ({"sbatch": {"exclude": "n[07-08]", "nodelist": "n1"}}, "exclude=n[07-08]"),
        ({"sbatch": {"wckey": "a b"}}, 'wckey="a b"'),
        ({"sbatch": {"comment": 'say "hi" \\ # no'}}, 'comment="say \\"hi\\" \\\\ # no"'),
    ],
)
def test_every_wish_has_its_line(changes: dict[str, object], line: str) -> None:
    assert line in header(make_job(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"gpus_per_node": 4, "gpu_request": "none"},
        {"mem_gb": 64, "mem_request": "none"},
        {"mem_gb": 0, "mem_request": "mem-per-cpu", "cpus_per_node": 2},
        {"sbatch": {"exclusive": False}},
    ],
)
def test_what_a_site_does_not_want_is_left_out(changes: dict[str, object]) -> None:
    assert not {"gres", "gpus-per-node", "mem", "mem-per-cpu", "exclusive"} & set(
        sbatch_options(make_job(**changes))
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partition": "a\nb"}, "line breaks"),
        ({"account": "a\0b"}, "NUL"),
        ({"sbatch": {"comment": "a\n#SBATCH --nodes=99"}}, "line breaks"),
        ({"srun": {"label-x": "a\nb"}}, "line breaks"),
        ({"sbatch": {"bad key": 1}}, "not the long name of an option"),
        ({"sbatch": {"nodes": 4}}, "nodes= instead"),
        ({"sbatch": {"time": "1:00"}}, "time_limit= instead"),
        ({"sbatch": {"output": "x"}}, "Remove it there"),
        ({"sbatch": {"requeue": True}}, "or the value `expedite`"),
        ({"sbatch": {"ntasks": 4}}, "which slurmddp writes itself"),
        ({"sbatch": {"export": "NONE"}}, "under `env:` in the cluster file"),
        ({"sbatch": {"chdir": "/scratch"}}, "ranks start in the folder of the command"),
        ({"sbatch": {"wait": True}}, "slurmddp logs -f RUN"),
        ({"sbatch": {"hetjob": True}}, "are of one kind"),
        (
            {"gpus_per_node": 8, "sbatch": {"gpus-per-task": 1}},
            "already asks for its GPUs with --gpus-per-node=8",
        ),
        ({"gpus_per_node": 8, "sbatch": {"gres": "gpu:8"}}, "gpu_request: none"),
        ({"gpus_per_node": 8, "sbatch": {"gres": "nvme:1,gpu:8"}}, "gpu_request: none"),
        ({"gpus_per_node": 8, "sbatch": {"tres_per_task": "cpu:8,gres/gpu:1"}}, "gpu_request: none"),
        ({"gpus_per_node": 8, "sbatch": {"tres-per-task": "gres/gpu=8"}}, "gpu_request: none"),
        ({"sbatch": {"ntasks_per_gpu": 1}}, "a rank for each GPU"),
        ({"sbatch": {"array": "0-3"}}, "one run for each element"),
        ({"sbatch": {"clusters": "b"}}, "export SLURM_CLUSTERS=NAME"),
        ({"env": {"SLURMDDP_SECRET": "1"}}, "sets itself"),
        ({"srun": {"ntasks": 4}}, "Remove it there"),
        ({"env": {"A B": "1"}}, "underscores"),
        ({"env": {"A": "1\0"}}, "NUL"),
        ({"setup": ("module load \0",)}, "NUL"),
        ({"setup": ("#SBATCH --nodes=2",)}, "`sbatch:`"),
        ({"run_dir": Path("/runs/a\nb")}, "line breaks"),
        ({"run_dir": Path("/runs/a\\b")}, "path with a backslash"),
        ({"python": "/env\0/python"}, "NUL"),
        ({"gpus_per_node": 1, "gpu_request": "gpus"}, "gpus-per-node, gres or none"),
        ({"mem_gb": 1, "mem_request": "per-node"}, "mem, mem-per-cpu, mem-per-gpu or none"),
        ({"mem_gb": -1}, "GiB per node"),
        ({"mem_gb": 8, "mem_request": "mem-per-cpu"}, "cpus_per_node="),
        ({"mem_gb": 8, "mem_request": "mem-per-gpu"}, "gpus_per_node="),
        ({"sbatch": {"mem_per_gpu": "8G"}}, "mem_request instead"),
        ({"signal_lead_s": 0}, "seconds"),
        ({"time_limit_min": 1, "signal_lead_s": 60}, "time_limit="),
    ],
)
def test_values_that_no_script_can_carry_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render(make_job(**changes))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt", "gpt"),
        ("my run; rm -rf /", "my-run-rm-rf"),
        ("a%j/b", "a-j-b"),
        ("$(x)", "x"),
        ("\n", "slurmddp"),
    ],
)
def test_job_names_fit_slurms_tables(name: str, expected: str) -> None:
    assert sbatch_options(make_job(run_name=name))["job-name"] == expected


def test_percent_signs_of_a_folder_are_no_file_patterns() -> None:
    assert "output=/r/50%%j/logs/slurm-%j.out" in header(make_job(run_dir=Path("/r/50%j")))


def test_a_job_names_its_tasks_in_both_ways_and_a_site_may_forbid_one() -> None:
    both = sbatch_options(make_job(nodes=2, spare_nodes=1))
    assert (both["ntasks"], both["ntasks-per-node"]) == (3, 1)
    for name in ("ntasks", "ntasks_per_node"):
        left = sbatch_options(make_job(sbatch={name: False}))
        assert {"ntasks", "ntasks-per-node"} - set(left) == {name.replace("_", "-")}


def test_a_cluster_file_may_ask_for_expedited_requeues() -> None:
    expedited = {"--requeue": "expedite"}
    assert "requeue=expedite" in header(make_job(sbatch=expedited))
    never = header(make_job(sbatch=expedited, requeue=False))
    assert "no-requeue" in never and "requeue=expedite" not in never


def test_a_site_with_another_way_to_ask_for_gpus_gets_it() -> None:
    asked = {"gpus-per-task": 8, "gres": "lustre:1"}
    own = sbatch_options(make_job(gpus_per_node=8, gpu_request="none", sbatch=asked))
    assert own["gpus-per-task"] == 8 and "gpus-per-node" not in own
    for other in ("lustre:1", "nvme_gpu:1", "gpumem:4"):
        assert sbatch_options(make_job(gpus_per_node=8, sbatch={"gres": other}))["gres"] == other


HOSTILE = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=30)


@settings(max_examples=40, deadline=None)
@given(value=HOSTILE)
def test_values_reach_the_shell_unchanged(value: str) -> None:
    text = render(make_job(env={"HOSTILE": value}, python=f"/env/{value}"))
    lines = text[text.index("export HOSTILE=") :]
    assignment = lines[: len(f"export HOSTILE={shlex.quote(value)}")]
    probe = f"{assignment}\nprintf '%s' \"$HOSTILE\""
    assert subprocess.run(["bash", "-c", probe], capture_output=True).stdout == value.encode()
    assert subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True).returncode == 0


@pytest.mark.parametrize("changes", [{"spare_nodes": 2}, {"elastic": True}], ids=["spares", "elastic"])
def test_the_job_and_its_step_outlive_a_node(changes: dict[str, int]) -> None:
    job = make_job(nodes=4, srun={"no-kill": True}, **changes)
    asked = 4 + job.resources.spare_nodes
    text = render(job)
    assert sbatch_options(job)["no-kill"] is True
    assert f"#SBATCH --nodes={asked}\n" in text and "#SBATCH --no-kill\n" in text
    assert f"srun --nodes={asked} --ntasks={asked} --ntasks-per-node=1 \\\n            --no-kill \\\n" in text
    assert "--kill-on-bad-exit=0 " in text
    assert job.resources.world_size == 8


def test_a_job_that_has_neither_ends_with_its_node() -> None:
    text = render(make_job())
    assert "no-kill" not in text and "--kill-on-bad-exit=1 " in text
    with pytest.raises(ConfigError, match="no-kill") as caught:
        render(make_job(sbatch={"no-kill": True}))
    assert "spare_nodes= or elastic=" in caught.value.hint


def test_a_staged_environment_is_copied_by_the_batch_program() -> None:
    text = render(make_job(stage="/tmp"))
    (line,) = (line for line in text.splitlines() if line.endswith("/job.pyz stage \\"))
    assert line.strip().startswith('"$SLURMDDP_PYTHON" -IS ')
    assert "-m slurmddp.launchers.agent" not in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stage": "tmp"}, "neither an absolute path nor a variable"),
        ({"stage": "/tmp", "srun": {"container-image": "/images/torch.sqsh"}}, "container-image"),
    ],
)
def test_environments_that_cannot_be_staged_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        render(make_job(**changes))
