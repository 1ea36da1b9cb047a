"""A power cut on a sandbox's node: nothing on it lives to see, or to tell, that something else died."""

from __future__ import annotations

import subprocess

from slurmddp.sandbox import processes
from support.runs.agent_runs import children_of, wait_until
from support.slurm.faulty_sandbox import cut_power


def test_a_parent_does_not_report_the_death_of_its_child(tmp_path) -> None:
    told = tmp_path / "told"
    shells = [
        subprocess.Popen(["sh", "-c", f"sleep 600; echo told >> {told}"], start_new_session=True)
        for _ in range(20)
    ]
    wait_until(lambda: all(children_of(shell.pid) for shell in shells), "each shell has its sleep")
    pids = [pid for shell in shells for pid in (shell.pid, *(child.pid for child in children_of(shell.pid)))]
    everyone = sorted(pids, reverse=True)
    cut_power(lambda: {pid for pid in everyone if processes.start_time(pid) is not None})
    for shell in shells:
        shell.wait(120)
    assert not told.exists()
