"""Behaviour of the batch script that only bash can get wrong: signals, setup lines, variables, exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from slurmddp.runs.folder import freeze
from slurmddp.settings.spec import Program
from slurmddp.slurm.script import render_array
from support.runs.agent_runs import wait_until
from support.slurm.script_run import FAIL, FINISH, PREEMPTED, SAVE, STOP, Script
from support.slurm.slurm_jobs import make_job


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


@pytest.mark.parametrize(
    ("step", "code", "end"),
    [
        (FINISH, 0, ("finished", "none")),
        (STOP, 75, ("stopped", "requeue")),
        (SAVE + FAIL, 137, ("failed", "requeue")),
        ('echo \'{"exit_code": 78}\' >"$logs/failure.json"; exit 143', 78, ("config", "none")),
    ],
    ids=["finished", "stopped", "killed", "refused"],
)
def test_the_script_ends_with_the_code_of_its_attempt(
    script: Script, step: str, code: int, end: tuple[str, str]
) -> None:
    done = script.run(step)
    names_log = f"Rank 0 logs to {script.folder.path}/logs/attempt-0/rank-0.log\n"
    assert (done.returncode, done.stdout, done.stderr) == (code, names_log, "")
    assert script.end == end
    assert script.requeued() == (end[1] == "requeue")


# --- Signals ---


def test_a_signal_does_not_end_the_wait_and_is_not_ignored_by_the_ranks(script: Script) -> None:
    step = "kill -TERM $PPID; kill -USR2 $PPID; sleep 0.3\n"
    step += 'grep SigIgn /proc/self/status >"$FAKE_SLURM/ignored"\n' + STOP
    assert script.start(step) == 75
    assert script.end == ("stopped", "requeue")
    ignored = int(script.programs.read("ignored").split()[1], 16)
    assert not ignored & (1 << 14 | 1 << 11)  # SIGTERM and SIGUSR2


def test_signals_do_not_change_the_code_of_the_ranks(tmp_path: Path) -> None:
    """The shell's `wait` says -1 or 143 for a child whose end and a signal come at one moment."""
    program = Program(target="mine.train", config={})
    script = Script(tmp_path, program=program, max_requeues_without_progress=99)
    script.programs.write("step", 'touch "$logs/began"; sleep "0.0$((RANDOM % 9))"\n' + STOP)
    for attempt in range(6):
        began = script.folder.log_dir(attempt) / "began"
        process = subprocess.Popen(["bash", str(script.folder.script_file)], env=script.environ)
        while process.poll() is None:
            if began.exists():
                process.terminate()
            time.sleep(0.001)
    assert [event["exit_code"] for event in script.events("ended")] == [75] * 6


@pytest.mark.parametrize("place", ["on-ask", "requeue", "update"])
def test_a_signal_while_slurm_is_asked_ends_nothing(script: Script, place: str) -> None:
    """SLURM sends SIGTERM to all processes of a job that it requeues, also to the next request."""
    down = "NodeName=n2 State=DOWN SlurmdStartTime=2020-01-01T00:00:00\n"
    script.programs.write("nodes", down)
    script.programs.write(place, 'kill -TERM "$PPID" "$(cut -d " " -f 4 "/proc/$PPID/stat")"; touch went-on')
    assert script.start(STOP) == 75
    assert script.end == ("stopped", "requeue")
    assert (script.programs.folder / "went-on").exists()
    assert "update JobId=41 ExcNodeList=n2" in script.programs.read("scontrol.calls")


def test_a_script_that_slurm_is_ending_does_not_wait_for_that(script: Script) -> None:
    script.programs.write("job", "JobState=PENDING Reason=BeginTime Restarts=1 NodeList=")
    parents = "parent=$PPID; while grep -q job.sbatch /proc/$parent/cmdline; do kill -TERM $parent;"
    parents += " parent=$(cut -d ' ' -f 4 /proc/$parent/stat); done"
    assert script.start(f"{parents}; sleep 0.3; {FAIL}", SLURMD_NODENAME="n1") == 137
    assert "waits until SLURM ends it" not in script.log()


def test_on_a_host_that_slurm_has_given_up_the_script_waits_to_be_ended(script: Script) -> None:
    script.programs.write("job", "JobState=PENDING Reason=BeginTime Restarts=1 NodeList=")
    script.programs.write("step", FAIL)
    environ = {**script.environ, "SLURMD_NODENAME": "n1"}
    process = subprocess.Popen(["bash", str(script.folder.script_file)], env=environ, start_new_session=True)
    log = script.folder.log_dir(0) / "batch.log"
    wait_until(lambda: log.exists() and "waits until SLURM ends it" in log.read_text(), "the script waits")
    assert process.poll() is None

    def has_ended() -> bool:
        """Send SIGTERM again, which the batch step still ignores for a moment after that line."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        return process.poll() is not None

    wait_until(has_ended, "SIGTERM ends the script")
    assert process.returncode == 143


# --- Setup lines ---


def test_a_strict_mode_of_the_setup_lines_ends_with_them(tmp_path: Path) -> None:
    script = Script(tmp_path, setup=("set -euo pipefail", "trap 'exit 9' TERM ERR EXIT"))
    assert script.start("kill -TERM $PPID; sleep 0.1\n" + STOP) == 75
    assert script.end == ("stopped", "requeue")


BEFORE = "before any rank was started"


@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        (("set -e", "false"), 1, BEFORE),
        (("exit 3",), 3, BEFORE),
        (("exit 0",), 1, BEFORE),
        (("set -u", "echo $UNSET"), 1, BEFORE),
        (("if true; then",), 1, "bash can't read the setup lines"),
    ],
)
def test_setup_lines_that_end_the_script_are_a_failure(
    tmp_path: Path, lines: tuple[str, ...], code: int, said: str
) -> None:
    script = Script(tmp_path, setup=lines)
    assert script.start() == code
    assert script.end == ("failed", "none")
    assert script.events("ended")[0]["exit_code"] == code
    assert said in script.log()
    assert not script.srun_began


@pytest.mark.parametrize(
    "lines", [("set -e", "false"), ("exit 75",), ("kill -TERM $BASHPID", "touch $HOME/x")]
)
def test_a_preemption_that_ends_a_setup_line_is_no_failure(tmp_path: Path, lines: tuple[str, ...]) -> None:
    """SLURM signals all that the batch step has started, the commands of the setup lines too."""
    script = Script(tmp_path, setup=lines)
    script.programs.write("job", PREEMPTED)
    assert script.start(HOME=str(tmp_path)) == 1
    assert script.end == ("stopped", "requeue")
    assert script.requeued() == 1
    assert not script.srun_began and not (tmp_path / "x").exists()


def warnings(script: Script) -> list[str]:
    return [event["text"] for event in script.events("warned") if event["about"] == "setup"]


def test_a_setup_line_that_fails_is_reported_and_the_ranks_start(tmp_path: Path) -> None:
    lines = ("source /nope/activate", "  load() { return 3; }", '  load "a\\b"', "true", "export A=1")
    script = Script(tmp_path, setup=lines)
    assert script.start() == 0
    assert script.end == ("finished", "none")
    first, second = warnings(script)
    assert first.startswith("The setup line `source /nope/activate` failed with code 1.")
    assert second.startswith('The setup line `load "a\\b"` failed with code 3.')
    assert "`set -e`" in first
    assert "The setup line `source /nope/activate` failed" in script.log()
    assert all(event["attempt"] == 0 for event in script.events("warned"))


def test_setup_lines_whose_failure_is_meant_are_not_reported(tmp_path: Path) -> None:
    sourced = tmp_path / "activate"
    sourced.write_text("false\nreturn 0\n")
    lines = (
        "false || true",
        "if false; then true; fi",
        "[ -e /nope ] && true",
        "! true",
        f"source {sourced}",
    )
    script = Script(tmp_path, setup=lines)
    assert script.start() == 0
    assert warnings(script) == []


def test_a_line_that_ends_the_setup_is_named(tmp_path: Path) -> None:
    script = Script(tmp_path, setup=("set -e", "ls /nope/nope"))
    assert script.start() == 2
    assert "`ls /nope/nope` failed with code 2" in warnings(script)[0]


OWN_NAMES = ("settings", "code", "job", "log", "run", "attempt", "nodes", "python", "batch_step", "finish")


@pytest.mark.parametrize("where", ["env", "setup"])
def test_no_name_that_the_script_uses_itself_can_be_taken(tmp_path: Path, where: str) -> None:
    """The ranks see such a variable as it was given; the script decides by its own."""
    lines = ("set -- a b", *(f"export {name}=999" for name in OWN_NAMES), "false")
    names = dict.fromkeys(OWN_NAMES, "999")
    script = Script(tmp_path, **({"env": names} if where == "env" else {"setup": lines}))
    assert script.start(STOP) == 75
    assert script.end == ("stopped", "requeue")
    assert len(warnings(script)) == (where == "setup")
    assert {f"{name}=999" for name in OWN_NAMES} <= set(script.programs.read("srun.env").splitlines())
    words = script.programs.read("srun.argv").splitlines()
    assert words[-3:] == ["-m", "slurmddp.launchers.agent", str(script.folder.path)]
    output = str(script.folder.log_dir(0)).replace("%", "%%")
    assert f"--output={output}/node-%n.log" in words


def test_no_setup_line_prints_the_secret(tmp_path: Path) -> None:
    script = Script(tmp_path, setup=("env", "set", "declare -p", "set -x; set -a"))
    script.start(STOP)
    (secret,) = re.findall(
        r"^SLURMDDP_SECRET=([0-9a-f]{32})$", script.programs.read("srun.env"), re.MULTILINE
    )
    assert "SLURMDDP_ATTEMPT" in script.log()
    assert secret not in script.log()


# --- Around srun ---


def test_the_step_is_one_agent_per_node(tmp_path: Path) -> None:
    script = Script(tmp_path, cpus_per_node=8, srun={"gpu-bind": "none", "label_x": "a b"})
    script.start()
    logs = str(script.folder.log_dir(0)).replace("%", "%%")
    assert script.programs.read("srun.argv").splitlines() == [
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=8",
        "--gpu-bind=none",
        "--label-x=a b",
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--mpi=none",
        "--export=ALL",
        f"--output={logs}/node-%n.log",
        "/home/ada/env/bin/python",
        "-m",
        "slurmddp.launchers.agent",
        str(script.folder.path),
    ]


def test_the_agents_find_their_run_and_a_clean_environment(tmp_path: Path) -> None:
    script = Script(
        tmp_path, cpus_per_node=8, env={"GREETING": "it's $HOME; `id`"}, setup=("export FROM_SETUP=$UNSET.",)
    )
    leaked = ("CPU_BIND", "CPU_BIND_LIST", "STEP_ID", "TRES_PER_TASK", "GPUS_PER_TASK", "MEM_PER_CPU")
    kept = {"SLURM_CPUS_PER_TASK": "8"}  # as the header asks for it
    script.start(FINISH, **{f"SLURM_{name}": "leaked" for name in leaked}, SLURMDDP_END_TIME="1", **kept)
    environ = script.programs.read("srun.env")
    for line in (
        f"SLURMDDP_RUN_DIR={script.folder.path}",
        "SLURMDDP_ATTEMPT=0",
        "SLURMDDP_LEAD_S=120",
        "SLURMDDP_END_TIME=",
        "PYTHONUNBUFFERED=1",
        "SLURM_EXPORT_ENV=ALL",
        "SRUN_CPUS_PER_TASK=8",
        "SLURM_CPUS_PER_TASK=8",
        "GREETING=it's $HOME; `id`",
        "FROM_SETUP=.",
        f"PWD={tmp_path / 'project'}",
    ):
        assert line in environ.splitlines()
    assert re.search("^SLURMDDP_SCRIPT_PID=[0-9]+$", environ, re.MULTILINE)
    assert "leaked" not in environ


def test_a_job_that_asks_for_no_cpus_has_none_of_the_job_around_it(script: Script) -> None:
    script.start(FINISH, SLURM_CPUS_PER_TASK="1", SLURM_MEM_PER_NODE="1024", SLURM_CLUSTERS="other")
    environ = script.programs.read("srun.env")
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE", "SLURM_CLUSTERS"):
        assert name not in environ


@pytest.mark.parametrize(
    ("array", "code", "said"), [("40", 78, "Job 40 is an array"), ("", 0, "A person stopped this run")]
)
def test_a_job_that_starts_no_attempt_ends_with_the_code_of_begin(
    script: Script, array: str, code: int, said: str
) -> None:
    script.folder.stop_file.touch()
    done = script.run(SLURM_ARRAY_JOB_ID=array)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert not script.srun_began


def test_the_script_of_an_array_runs_the_script_of_each_element(script: Script) -> None:
    array = script.folder.path.parent / ".it's an array"
    array.mkdir()
    (array / "elements").write_text(f"a\nb\nc\n{script.folder.name}\n")
    (array / "job.sbatch").write_text(render_array([make_job()], array))
    script.programs.write("step", FINISH)
    environ = {**script.environ, "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}
    command = ["bash", str(array / "job.sbatch")]
    # A new run has no code until its first start.
    code = array / "element/code"
    (code / "package").mkdir(parents=True)
    (code / "package/fit.py").write_text("pass\n")
    (code / "data").symlink_to("/data")
    (array / "element/code.json").touch()
    script.folder.batch_file.rename(array / "element/job.pyz")
    # As a start leaves it that SLURM has killed.
    (script.folder.code_dir / "package").mkdir(parents=True)
    (script.folder.code_dir / "data").symlink_to("/data")
    (script.folder.path / ".job.pyz").write_bytes(b"half")
    for attempt in (0, 1):
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        told = (script.folder.path / "logs/slurm-40_3.out").read_text()
        logs = [
            f"Rank 0 logs to {script.folder.path}/logs/attempt-{k}/rank-0.log" for k in range(attempt + 1)
        ]
        assert (done.returncode, done.stderr, told.splitlines()) == (0, "", logs)
        assert (
            script.events("started")[attempt]["job_id"] == script.events("ended")[attempt]["job_id"] == "40_3"
        )
        assert script.end == ("finished", "none")
        assert (script.folder.code_dir / "data").readlink() == Path("/data")
        file = script.folder.code_dir / "package/fit.py"
        assert file.stat().st_nlink == script.folder.batch_file.stat().st_nlink == 1
        # The second start keeps what the run has written.
        assert file.read_text() == ("pass\n" if attempt == 0 else "changed\n")
        file.write_text("changed\n")
    before = sorted(array.parent.rglob("*"))
    for index, words in (
        ("0", "is no run folder"),  # It is gone.
        ("4", "can't read the name of element 4"),  # Line 5 of `elements` does not exist.
    ):
        environ["SLURM_ARRAY_TASK_ID"] = index
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert done.returncode == 1 and words in done.stderr
    (array / "elements").unlink()
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 1 and "Nothing was started" in done.stderr
    assert sorted(array.parent.rglob("*")) == [path for path in before if path.name != "elements"]


def test_a_host_without_python_starts_nothing(script: Script, tmp_path: Path) -> None:
    bash = "/bin/bash"
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/hostname").symlink_to("/bin/hostname")
    environ = {**script.environ, "PATH": str(tmp_path / "bare")}
    command = [bash, str(script.folder.script_file)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 1
    assert "There is no python3 on" in done.stderr
    assert not script.folder.attempts_file.exists()


@pytest.mark.parametrize(
    ("of_ranks", "of_host"),
    [
        ("binary", "exit 1"),
        ("#!/bin/bash\nexit 1\n", "new"),
        ('#!/bin/bash\nexec {python} "$@"\n', "exit 1"),
    ],
    ids=["binary", "container", "wrapper beside an old Python"],
)
def test_a_script_as_python_runs_the_batch_step_only_without_another(
    tmp_path: Path, of_ranks: str, of_host: str
) -> None:
    """Scripts enter containers, which have no command of SLURM."""
    python = tmp_path / "it's python"
    script = Script(tmp_path, python=str(python))
    interpreter = script.python.resolve()
    if of_ranks == "binary":
        python.symlink_to(interpreter)
    else:
        python.write_text(of_ranks.format(python=interpreter))
        python.chmod(0o755)
    if of_host != "new":
        script.python.unlink()
        script.python.write_text(f"#!/bin/bash\n{of_host}\n")
        script.python.chmod(0o755)
    done = script.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert script.end == ("finished", "none")


def impatient(source: Callable[[str], bytes]) -> Callable[[str], bytes]:
    def changed(module: str) -> bytes:
        return (
            source(module)
            .replace(b"_LEFT_S = 60.0", b"_LEFT_S = 0.2")
            .replace(b"_TICK_S = 2.0", b"_TICK_S = 0.1")
        )

    return changed


@pytest.mark.parametrize(
    "line",
    [
        ":",
        "exec 3>&1 4</dev/null 6<&1 7>&2 8>&1 9>&1 87>/dev/null 200>&1 255>/dev/null",
        'for number in {3..255}; do eval "exec $number>&-"; done',
        "exec >/dev/null 2>&1",
        "exec <&- >&- 2>&-",
    ],
    ids=["nothing", "uses many", "closes all", "says nothing", "has no output"],
)
def test_an_srun_that_waits_for_agents_which_have_left_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """The watch gets the process that runs srun, whatever a setup line has done to descriptors.

    It is as impatient as a test. srun reads nothing, and its words stand in the log of the batch script.
    """
    script = Script(tmp_path, setup=(line,))
    monkeypatch.setattr(freeze, "_source", impatient(freeze._source))
    monkeypatch.setattr(freeze, "_compiled", lambda *_: b"")
    script.folder.batch_file.write_bytes(freeze.batch_program.__wrapped__())
    words = 'readlink /proc/self/fd/0; echo "srun: error: words" >&2\n'
    assert script.start(words + FINISH.replace("exit 0", "exec sleep 600")) == 0
    assert script.end == ("finished", "none")
    assert "/dev/null\nsrun: error: words\n" in script.log()
    assert "this script ends srun" in script.log()
    assert "descriptor" not in script.log()
