"""The nodes of `salloc`: when a shell holds some, whether they are enough, and the step that srun starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.errors import ConfigError, SlurmError
from slurmddp.launchers.local.allocation import around, current, for_srun
from slurmddp.slurm.client import SlurmClient

SHELL = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2),2",
}


def test_a_shell_of_salloc_holds_nodes_and_a_task_of_srun_does_not() -> None:
    found = around(SHELL)
    assert found and (found.job_id, found.nodes, found.cpus, found.hosts) == ("7", 3, 2, "n[1-3]")
    interactive = {**SHELL, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}  # LaunchParameters of a site
    assert around(interactive) == found
    assert around({}) is None
    assert around({**SHELL, "SLURMDDP_EMULATED": "1"}) is None
    assert around({**SHELL, "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}) is None


def test_more_nodes_than_it_holds_and_a_missing_srun_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = around(SHELL)
    assert found
    with pytest.raises(ConfigError, match=r"nodes=4 is more than the 3 node.* \(job 7\)\. Use 3 or fewer"):
        found.require(4, "nodes=4")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="no srun on PATH"):
        found.require(3, "nodes=3")
    (tmp_path / "srun").touch(0o755)
    found.require(3, "nodes=3")


FACTS = {"JobState": "RUNNING", "NodeList": "n[1-3]", "NumNodes": "3", "NumCPUs": "12"}
BARE = {"SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("environ", "facts", "expected"),
    [
        (BARE, FACTS, (3, 4, "n[1-3]")),
        (BARE, {**FACTS, "NumCPUs": "11"}, (3, None, "n[1-3]")),
        (BARE, {**FACTS, "NodeList": "(null)"}, (1, None, "")),
        (BARE, {}, (1, None, "")),
        (BARE, SlurmError("slurmctld does not answer."), (1, None, "")),
        (SHELL, {**FACTS, "NodeList": "n[1-9]"}, (3, 2, "n[1-3]")),
        (SHELL, SlurmError("slurmctld does not answer."), (3, 2, "n[1-3]")),
    ],
)
def test_slurm_knows_the_nodes_of_a_shell_that_has_only_the_number_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], facts: object, expected: object
) -> None:
    answer_with(facts, tmp_path, monkeypatch)
    found = current(environ)
    assert found and (found.nodes, found.cpus, found.hosts) == expected


@pytest.mark.parametrize("environ", [BARE, SHELL])
@pytest.mark.parametrize(
    ("facts", "state"), [(None, "SLURM does not know it"), ({**FACTS, "JobState": "TIMEOUT"}, "TIMEOUT")]
)
def test_a_shell_that_outlives_its_job_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], facts: object, state: str
) -> None:
    answer_with(facts, tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=rf"SLURM_JOB_ID is 7, and this job is over \({state}\).*unset"):
        current(environ)


def answer_with(facts: object, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(client: SlurmClient, job_id: str) -> object:
        assert job_id == "7"
        if isinstance(facts, SlurmError):
            raise facts
        return facts

    monkeypatch.setattr(SlurmClient, "facts", answer)
    (folder / "scontrol").touch(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize("tolerates", [True, False])
def test_the_step_has_an_agent_with_all_cpus_on_each_node(tolerates: bool) -> None:
    found = around(SHELL)
    assert found
    words = found.agents(2, Path("/runs/50%/logs"), tolerates)
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--overlap"} <= set(words)
    assert f"--kill-on-bad-exit={0 if tolerates else 1}" in words
    assert "--output=/runs/50%%/logs/node-%n.log" in words


def test_srun_gets_the_job_and_nothing_of_another_step_or_run() -> None:
    other = {
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_CPU_BIND": "mask_cpu:0x1",
        "SLURMDDP_ATTEMPT": "4",
        "RANK": "2",
    }
    assert for_srun({**SHELL, **other, "HOME": "/root"}) == {**SHELL, "HOME": "/root"}
