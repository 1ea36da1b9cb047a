"""No process of a rank outlives the agent, however the agent ends; each rank's end is recorded.

The process trees are real. At the end of a step SLURM kills the processes that the site tracks: the whole
control group, the agent's process group alone (proctrack/pgid), or the remaining process tree
(proctrack/linuxproc). Other signals may reach the agent alone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from slurmddp.host.process import REAPER_NAME
from slurmddp.runs.failures.read import rank_exits
from slurmddp.runs.folder.layout import RunFolder
from support.runs.agent_runs import SAVING, make_run, runs, start_agent, wait_for_lines, wait_until

STUBBORN = "import signal, time; signal.pthread_sigmask(0, [1, 2, 15]); time.sleep(600)"
FAMILY = f"""
import os, subprocess, sys, time
def start(words, **options):
    return subprocess.Popen(words, **options).pid
def main(run_dir):
    stubborn = [sys.executable, "-c", {STUBBORN!r}]
    pids = [start(["sh", "-c", "sleep 600 & sleep 600 & wait"]), start(stubborn), {{also}}]
    os.write(1, ("started " + " ".join(map(str, pids)) + " all\\n").encode())
    {{ending}}
"""
SHARING = """
import os, time
from multiprocessing import shared_memory
from pathlib import Path
def main(run_dir):
    memory = shared_memory.SharedMemory(create=True, size=9)
    os.write(1, f"made {{memory.name}} now\\n".encode())
    made = [Path(run_dir) / f"made-{{rank}}" for rank in range(2)]
    made[int(os.environ["RANK"])].touch()
    while not all(path.exists() for path in made):
        time.sleep(0.01)
    if os.environ["RANK"] == "0":
        {ending}
    time.sleep(600 if "kill" in "{ending}" else 0)
"""
DAEMON = 'start(["sleep", "600"], start_new_session=True)'


def started(folder: RunFolder) -> list[int]:
    """Return the processes that the ranks say they have started; a rank that was ended early has no log."""
    logs = folder.rank_log(0, 0).parent.glob("rank-*.log")
    texts = [log.read_text() for log in logs]
    return [int(word) for text in texts for word in text.split() if word.isdecimal()]


def reaper_of(agent: int) -> psutil.Process:
    """Return the reaper of an agent, once it has its name."""

    def found() -> list[psutil.Process]:
        return [one for one in psutil.Process(agent).children() if one.name() == REAPER_NAME]

    wait_until(found, "the reaper has its name")
    (reaper,) = found()
    return reaper


def kill_it(agent: psutil.Process) -> None:
    """As who types `kill -9`, or the kernel for want of memory."""
    agent.kill()


def kill_its_group(agent: psutil.Process) -> None:
    """As SLURM under proctrack/pgid."""
    os.killpg(agent.pid, signal.SIGKILL)


def kill_its_tree(agent: psutil.Process) -> None:
    """As SLURM under proctrack/linuxproc, from the top."""
    for process in [agent, *agent.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # A rank ends with its agent.
            process.kill()


@pytest.mark.parametrize("kill", [kill_it, kill_its_group, kill_its_tree])
def test_what_ranks_have_started_ends_with_a_killed_agent(
    tmp_path: Path, kill: Callable[[psutil.Process], None]
) -> None:
    folder = make_run(tmp_path, FAMILY.format(also="", ending="time.sleep(600)"))
    with start_agent(folder) as agent:
        ours = psutil.Process(agent.pid)
        whole = 2 * (1 + 3 + 1) + 1  # Of each rank itself, a shell and its two, a deaf one; the reaper.
        wait_until(lambda: len(ours.children(recursive=True)) == whole, "all have begun")
        tree = ours.children(recursive=True)
        kill(ours)
        wait_until(lambda: not any(runs(process) for process in tree), "the whole tree ends")


@pytest.mark.parametrize("ending", ["return 0", "return 3", "os.kill(os.getpid(), 9)"])
def test_what_left_the_group_of_its_rank_ends_with_the_agent(tmp_path: Path, ending: str) -> None:
    folder = make_run(tmp_path, FAMILY.format(also=DAEMON, ending=ending))
    with start_agent(folder) as agent:
        agent.wait(timeout=120)
    pids = started(folder)
    assert len(pids) >= 3, "what one rank has started at least"
    wait_until(lambda: not any(map(runs, pids)), "all that was below the agent ends")


@pytest.mark.parametrize("ending", ["return 0", "os.kill(os.getpid(), 9)"])
def test_shared_memory_that_a_rank_leaves_is_removed(tmp_path: Path, ending: str) -> None:
    """Python's resource tracker removes it; where a rank dies, also that of the rank that is killed then."""
    folder = make_run(tmp_path, SHARING.format(ending=ending))
    with start_agent(folder) as agent:
        agent.wait(timeout=120)
    names = [folder.rank_log(0, rank).read_text().split()[1] for rank in range(2)]
    assert not any((Path("/dev/shm") / name).exists() for name in names)


def test_an_agent_whose_reaper_was_killed_goes_on(tmp_path: Path) -> None:
    folder = make_run(tmp_path, SAVING)
    with start_agent(folder) as agent:
        wait_for_lines(folder, "ready", 2)
        guarding = reaper_of(agent.pid)
        guarding.kill()
        wait_until(lambda: not guarding.is_running(), "the agent has taken note")
        agent.terminate()
        assert agent.wait(timeout=120) == 75


def test_the_reaper_hears_nothing_but_the_agents_death(tmp_path: Path) -> None:
    """SLURM sends every signal to each process of a tracked process tree."""
    folder = make_run(tmp_path, FAMILY.format(also="", ending="time.sleep(600)"))
    with start_agent(folder) as agent:
        wait_for_lines(folder, "all", 2)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGCONT):
            reaper_of(agent.pid).send_signal(number)
        tree = psutil.Process(agent.pid).children(recursive=True)
        agent.kill()
        wait_until(lambda: not any(runs(one) for one in tree), "the reaper has ended the whole tree")


def has_heard(process: psutil.Process) -> bool:
    """Whether no signal waits for it any more."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return all(int(line.split()[1], 16) == 0 for line in lines if line.startswith(("SigPnd", "ShdPnd")))


def test_a_hangup_that_reaches_the_reaper_too_leaves_the_ranks_alone(tmp_path: Path) -> None:
    """The kernel tells it of the agent's death by the same signal."""
    folder = make_run(tmp_path, SAVING)
    with start_agent(folder) as agent:
        wait_for_lines(folder, "ready", 2)
        guarding = reaper_of(agent.pid)
        guarding.send_signal(signal.SIGHUP)
        wait_until(lambda: not runs(guarding) or has_heard(guarding), "it has heard the signal")
        assert runs(guarding)
        agent.terminate()
        assert agent.wait(timeout=120) == 75
    wait_until(lambda: not runs(guarding), "it ends with its agent")


def test_an_orphan_that_ends_is_no_zombie(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, time\ndef main(run_dir):\n"
        "    subprocess.run(['sh', '-c', 'sleep 0.3 & echo started $! all'])\n"
        "    time.sleep(600)"
    )
    folder = make_run(tmp_path, program)
    with start_agent(folder) as agent:
        wait_for_lines(folder, "all", 2)
        wait_until(lambda: not any(map(psutil.pid_exists, started(folder))), "the agent collects the adopted")
        agent.kill()


def test_every_rank_leaves_how_it_ended(tmp_path: Path) -> None:
    """Also the ranks that were ended because one had failed: srun's code hides which was the first."""
    program = (
        "import os, signal, time\nrank = int(os.environ['RANK'])\ndef main(run_dir):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN if rank == 0 else signal.SIG_DFL)\n"
        "    print('ready', flush=True)\n"
        "    while len([name for name in os.listdir(run_dir) if name.startswith('ready')]) < 3:\n"
        "        open(f'{run_dir}/ready-{rank}', 'w').close()\n        time.sleep(0.01)\n"
        "    return 3 if rank == 2 else time.sleep(600)"
    )
    folder = make_run(tmp_path, program, ranks_per_node=3)
    with start_agent(folder) as agent:
        assert agent.wait(timeout=120) == 1
    ends = rank_exits(folder, 0)
    assert [(end.rank, end.exit_code, end.signal) for end in ends] == [
        (0, None, "SIGKILL"),
        (1, None, "SIGTERM"),
        (2, 3, None),
    ]
    assert {(end.host, end.restart_count) for end in ends} == {(os.uname().nodename, 0)}
    assert ends[2].time <= min(ends[0].time, ends[1].time)


def test_good_ends_are_written_too(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "import os\ndef main(run_dir): return 75 * int(os.environ['RANK'])")
    with start_agent(folder) as agent:
        assert agent.wait(timeout=120) == 75
    assert [end.exit_code for end in rank_exits(folder, 0)] == [0, 75]
