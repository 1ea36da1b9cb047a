"""Scripts on a real SLURM that save at a signal and then end: the signals of each rank, what follows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from support.frameworks.stops import SCRIPTS, check_no_step_is_lost, go_on, wait_for_steps, write_scripts
from support.slurm.sandboxes import own_sandbox
from support.slurm.train_project import Command, Run, occupy

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

folder, attempt = Path(os.environ["SLURMDDP_RUN_DIR"]), int(os.environ["SLURMDDP_ATTEMPT"])
rank = os.environ["RANK"]
saved, signals = folder / f"saved-{rank}", folder / f"signals-{rank}-{attempt}"
got = []

def note(number, frame):
    got.append(signal.Signals(number).name)

code, *names = sys.argv[1:]
for name in names:
    signal.signal(signal.Signals[name], note)
step = json.loads(saved.read_text()) if saved.exists() else 0
first, last = step, step + 10 if step else 1_000_000
(folder / f"begun-{rank}-{attempt}").write_text(str(step))
while step < last:
    step += 1
    time.sleep(0.1)
    if got:
        saved.write_text(json.dumps(step))
        time.sleep(2)  # Further signals would come now.
        signals.write_text(json.dumps({"signals": got, "step": step}))
        sys.exit(int(code))
"""
RANKS = range(4)
ENDS: Mapping[str, tuple[list[str], list[str], str, str]] = {
    "limit": (["SIGTERM", "SIGUSR2"], ["SIGUSR2"], "stopped", "requeue"),
    "limit-term": (["SIGTERM"], ["SIGTERM"], "stopped", "requeue"),
    "limit-error": (["SIGUSR2"], ["SIGUSR2"], "stopped", "requeue"),
    "preempted": (["SIGTERM", "SIGUSR2"], ["SIGTERM"], "stopped", "requeue"),
    "requeued": (["SIGTERM"], ["SIGTERM"], "stopped", "requeue"),
    "stop": (["SIGTERM", "SIGUSR2"], ["SIGUSR2"], "stopped", "none"),
    "stop-term": (["SIGTERM"], ["SIGTERM"], "stopped", "none"),
    "cancel": (["SIGTERM", "SIGUSR2"], ["SIGTERM"], "cancelled", "none"),
}
"""The handlers of each run, the signals that each rank gets, the outcome, and what comes next."""
ERROR = "limit-error"
"""The run whose ranks end with an error after they have saved, which no restart allows for."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Run]]:
    """One run for each way to stop; all were stopped once, resumed, and have finished."""
    project = tmp_path_factory.mktemp("signals")
    (project / "saves.py").write_text(SCRIPT)
    with own_sandbox("g", nodes=2, cpus=2 * len(ENDS)) as sandbox:
        command = Command(project, sandbox.environment())
        found = {name: submit(command, name) for name in ENDS}
        for run in found.values():
            run.wait("ranks", lambda run=run: len([*run.folder.glob("begun-*-0")]) == len(RANKS))
        for name in ("stop", "stop-term"):
            command("stop", found[name].folder.name)
        command("cancel", found["cancel"].folder.name)
        command.slurm("scontrol", "requeue", found["requeued"].job_id)
        for name in ("stop", "stop-term", "cancel"):
            found[name].wait("end", lambda name=name: found[name].events("ended"))
            command("resume", found[name].folder.name)
        for name in ("limit", "limit-term", ERROR):
            found[name].wait("end", lambda name=name: found[name].events("ended"))
        occupy(command)
        for run in found.values():
            run.wait_finished()
        yield found


def submit(command: Command, name: str) -> Run:
    limit = "1" if name.startswith("limit") else "10"
    own = ["+cluster=sandbox", f"name={name}", "nodes=2", "cpus_per_node=1", f"time_limit={limit}"]
    own += ["policy.signal_lead_s=15", "program.checkpoints='{run_dir}/saved-*'"]
    code = "0"
    if name == ERROR:
        own.append("policy.max_restarts=0")
        code = "1"
    command("run", *own, "-n", "2", "saves.py", code, *ENDS[name][0])
    (folder,) = (command.project / "runs").glob(f"{name}-[0-9a-f]*")
    return Run(folder, command)


def submit_framework(command: Command, name: str, *own: str) -> Run:
    own = (f"name={name}", "nodes=2", "cpus_per_node=1", "policy.grace_s=30", *own)
    command("run", "+cluster=sandbox", *own, "-n", "1", *SCRIPTS[name])
    (folder,) = (command.project / "runs").glob(f"{name}-[0-9a-f]*")
    return Run(folder, command)


@pytest.mark.parametrize("name", ENDS)
def test_a_script_that_saves_at_a_signal_and_ends_has_stopped_and_resumes(
    runs: Mapping[str, Run], name: str
) -> None:
    run = runs[name]
    _, signals, outcome, next_ = ENDS[name]
    found = [json.loads((run.folder / f"signals-{rank}-0").read_text()) for rank in RANKS]
    assert [one["signals"] for one in found] == [signals] * 4
    first, *_, last = run.events("ended")
    assert (first["outcome"], first["next"], last["outcome"]) == (outcome, next_, "finished"), run.story()
    for rank in RANKS:
        # A resumed attempt may have been preempted before its script began.
        resumed = min(run.folder.glob(f"begun-{rank}-[1-9]"))
        assert int(resumed.read_text()) == found[rank]["step"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ["limit", "preempted", "stop", "cancel"])
def test_every_framework_saves_when_slurm_or_a_person_stops_it(tmp_path: Path, way: str) -> None:
    write_scripts(tmp_path)
    # After a cancel all frameworks save and leave at the same time, which takes a small machine long.
    with own_sandbox("h", nodes=2, cpus=len(SCRIPTS) + 1, kill_wait_s=60) as sandbox:
        command = Command(tmp_path, sandbox.environment())
        own = ["time_limit=2", "policy.signal_lead_s=20"] if way == "limit" else ["time_limit=30"]
        found = {name: submit_framework(command, name, *own) for name in SCRIPTS}
        for run in found.values():
            wait_for_steps(run.folder)
            if way in ("stop", "cancel"):
                command(way, run.folder.name)
                go_on(run.folder)  # At once: SLURM soon kills the ranks of a cancelled job.
        if way == "preempted":
            occupy(command)
        for run in found.values():
            go_on(run.folder)
            if way in ("stop", "cancel"):
                run.wait("end", lambda run=run: run.events("ended"))
                command("resume", run.folder.name)
        for name, run in found.items():
            run.wait_finished()
            outcome = "cancelled" if way == "cancel" else "stopped"
            first, *later, last = [end["outcome"] for end in run.events("ended")]
            assert (first, last) == (outcome, "finished"), run.story()
            # On a busy machine the limit may come again before the program has trained to its end.
            assert set(later) <= {"stopped"} and (not later or way == "limit"), run.story()
            check_no_step_is_lost(run.folder, name, ranks=2, stops=1 + len(later))
