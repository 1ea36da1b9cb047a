"""`slurmddp train` and `run` on nodes that a person holds by salloc: stop, resume, kill, a lost launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.sandbox import Sandbox

pytestmark = pytest.mark.slurm

DEAF = """\
import signal, time
for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
    signal.signal(one, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""
SCRIPT = """\
until_there() { while ! grep -q "$1" $2 2>/dev/null; do sleep 0.1; done; }
steps() { squeue --steps --noheader --jobs=$SLURM_JOB_ID --format=%i; }
until_gone() { while [ -n "$(steps)" ]; do sleep 0.2; done; }
train() { exec "$0" -m slurmddp train nodes=2 ranks_per_node=1 train.log_every=1 name="$@"; }
bare() {
    id=${1:-$SLURM_JOB_ID} conf=$SLURM_CONF
    unset ${!SLURM_*}
    export SLURM_JOB_ID=$id SLURM_CONF=$conf
}
(train few nodes=4) >few.out 2>&1
echo "few $?"
(bare; exec "$0" -m slurmddp exec -n 3 hostname) >ssh.out 2>&1
echo "by ssh $?"
(bare 999999; train none nodes=2) >none.out 2>&1
echo "no job $?"
(train fit train.steps=100000) >fit.out 2>&1 &
until_there '"step": *2' 'runs/fit-*/metrics.jsonl'
kill -INT $!
wait $!
echo "stopped $?"
(train fit train.steps=100000) >>fit.out 2>&1 &
until_there 'resuming from step' fit.out
kill -KILL $!
until_gone
grep -l 'node 1 of 2' runs/fit-*/logs/attempt-1/node-1.log >/dev/null && echo "left behind: none"
"$0" -m slurmddp run nodes=2 -n 1 name=deaf deaf.py >deaf.out 2>&1 &
until_there ready 'runs/deaf-*/logs/attempt-0/rank-1.log'
kill -INT $!
until_there 'Ctrl-C once more kills' deaf.out
kill -INT $!
wait $!
echo "killed $?"
until_gone
"$0" -m slurmddp list --name fit >list.out && echo $SLURM_JOB_ID >id.out
echo end
"""


def test_a_run_in_an_allocation_uses_its_nodes_and_behaves_as_a_local_one(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    command = ["salloc", "--quiet", "--nodes=3", "bash", "-c", SCRIPT, sys.executable]
    environ = {**os.environ, **sandbox.environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
    outputs = {file.stem: file.read_text() for file in tmp_path.glob("*.out")}
    ends = [line for line in done.stdout.splitlines() if line]
    told = f"{done.stdout}{done.stderr}{outputs}"
    assert ends == [
        "few 78",
        "by ssh 0",
        "no job 78",
        "stopped 75",
        "left behind: none",
        "killed 130",
        "end",
    ], told
    assert "nodes=4 is more than the 3 nodes of this allocation" in outputs["few"]
    assert len(set(re.findall(r"\[rank \d\] (\S+)", outputs["ssh"]))) == 3, outputs["ssh"]
    assert "SLURM_JOB_ID is 999999, and this job is over (SLURM does not know it)" in outputs["none"]
    assert "(2 ranks on 2 nodes of job" in outputs["fit"] and "holds 3 nodes" in outputs["fit"]
    assert outputs["list"].splitlines()[1].split()[4] == outputs["id"].strip(), outputs["list"]
    assert outputs["fit"].count("Stopped at step") == 1 and "resuming from step" in outputs["fit"]
    assert "The script gets SIGUSR2" in outputs["deaf"]
