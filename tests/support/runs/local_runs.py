"""Runs on this machine whose ranks need no torch, for the tests of the local launcher."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slurmddp.launchers.local.run import LocalRun
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.lock import RunLock
from slurmddp.settings.schema import Cluster, PolicySettings
from slurmddp.settings.spec import Job, Program, Resources
from support import TESTS
from support.runs.agent_runs import SAVING, agent_command, make_run, wait_for_lines


def job_of(folder: RunFolder, **changes: object) -> Job:
    fields = {
        "name": "test",
        "run_name": folder.name,
        "run_dir": folder.path,
        "project_dir": folder.path.parents[1] / "project",
        "launcher": "local",
        "submitter": "sbatch",
        "python": sys.executable,
        "cluster": Cluster(name="local", env={"FROM_CLUSTER": "a b"}),
        "resources": Resources(nodes=1, ranks_per_node=2),
        "policy": PolicySettings(),
        "program": Program(target="rank_program.main", config={}),
    }
    return Job(**(fields | changes))


def local_run(
    tmp_path: Path,
    rank_program: str = "",
    *,
    nodes: int = 1,
    spare_nodes: int = 0,
    ranks_per_node: int = 2,
    agent: str = "",
    say: Callable[[str], None] = lambda text: None,
    **changes: object,
) -> LocalRun:
    """Return a run whose ranks run `rank_program`, or whose agents run the program `agent`."""
    folder = make_run(tmp_path, rank_program, nodes=nodes, ranks_per_node=ranks_per_node)
    resources = Resources(nodes=nodes, spare_nodes=spare_nodes, ranks_per_node=ranks_per_node)
    lock = RunLock(folder)
    assert lock.acquire()
    command = [*([sys.executable, "-c", agent] if agent else agent_command(tmp_path)), str(folder.path)]
    return LocalRun(job_of(folder, resources=resources, **changes), folder, lock, say, command=command)


HANGUP_ON = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
"""Code for `first` that restores the default action of SIGHUP, if the tests themselves run under `nohup`."""


@contextmanager
def terminal(
    tmp_path: Path, program: str = SAVING, *, first: str = HANGUP_ON
) -> Iterator[tuple[subprocess.Popen[bytes], RunFolder]]:
    """Start a run in a new process, for Ctrl-C; that process runs the code `first` before.

    Yields the process and the run folder once the ranks are ready.
    """
    folder = make_run(tmp_path, program)
    script = tmp_path / "person.py"
    command = [*agent_command(tmp_path), str(folder.path)]
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n"
        "from slurmddp.control.hold import hold\n"
        "from support.runs.local_runs import LocalRun, RunFolder, job_of\n"
        f"folder = RunFolder({str(folder.path)!r})\n{first}\n"
        "say = lambda text: print(text, file=sys.stderr, flush=True)\n"
        "with hold(folder, lambda waiting: say(waiting.reason)) as lock:\n"
        f"    run = LocalRun(job_of(folder), folder, lock, say, command={command!r})\n"
        "    run.start()\n    sys.exit(run.wait())\n"
    )

    with terminal_again(tmp_path) as person:
        try:
            wait_for_lines(folder, "ready", 2)
            yield person, folder
        finally:
            person.kill()  # Only a test that has failed leaves it running.


def terminal_again(tmp_path: Path) -> subprocess.Popen[bytes]:
    """Start the same run again, as when a person types the same command again."""
    return subprocess.Popen([sys.executable, str(tmp_path / "person.py")], stderr=subprocess.PIPE)
