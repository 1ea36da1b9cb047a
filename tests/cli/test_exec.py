"""`slurmddp exec`: any program as ranks, as mpiexec starts them; here, on emulated nodes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.cli.commands.exec import split
from slurmddp.cli.main import main
from slurmddp.environments.detect import detect
from slurmddp.environments.emit import emulated_step
from slurmddp.errors import EXIT_CONFIG, EXIT_USAGE, SlurmddpError
from slurmddp.host import process
from slurmddp.host.ports import candidate_ports
from slurmddp.launchers.local.exec import main as exec_main
from slurmddp.launchers.local.exec import run as run_ranks
from support.runs.agent_runs import runs, wait_until

COMMAND = [sys.executable, "-m", "slurmddp", "exec"]
NUMBERS = (
    "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK "
    "$OMPI_COMM_WORLD_RANK/$OMPI_COMM_WORLD_SIZE $OMPI_COMM_WORLD_LOCAL_RANK/$OMPI_COMM_WORLD_LOCAL_SIZE "
    "$PMI_RANK/$PMI_SIZE $MPI_LOCALRANKID/$MPI_LOCALNRANKS"
)
REDUCE = """
import sys
import torch
import torch.distributed as dist
from slurmddp import Distributon
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
dist.destroy_process_group()
with Distributon() as d:
    d.launch()
    print(total.item(), d.rank, d.world_size, d.local_rank, torch.get_num_threads())
"""


def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run([*COMMAND, *words], input=stdin, capture_output=True, text=True, env=environ)


@pytest.mark.parametrize(
    ("typed", "own", "program"),
    [
        (["-n", "4", "./solve", "-n", "5"], ["-n", "4"], ["./solve", "-n", "5"]),
        (["--nodes", "2", "-n4", "--", "-odd", "--", "x"], ["--nodes", "2", "-n4"], ["-odd", "--", "x"]),
        (["--help"], ["--help"], []),
    ],
)
def test_the_program_begins_at_the_first_word_that_is_no_flag(typed, own, program):
    assert split(typed) == (own, program)


def test_g5_each_rank_finds_its_number_by_the_variables_of_torchrun_and_of_mpi():
    done = run("-n", "4", "--nodes", "2", "--", "sh", "-c", f'echo "{NUMBERS}" "$@"', "sh", "a b", "--nodes")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {r}] {r}/4 {r % 2}/2 {r // 2} {r}/4 {r % 2}/2 {r}/4 {r % 2}/2 a b --nodes" for r in range(4)
    ]


def test_rank_zero_reads_the_standard_input():
    assert run("-n", "2", "sh", "-c", 'sed "s/^/$RANK /"', stdin="one\ntwo\n").stdout.splitlines() == [
        "[rank 0] 0 one",
        "[rank 0] 0 two",
    ]


@pytest.mark.parametrize(("end", "code"), [("exit 7", 7), ("kill -9 $$", 128 + signal.SIGKILL)])
def test_g5_the_first_failure_ends_all_ranks_and_gives_the_exit_code(tmp_path, end, code):
    script = f"cd {tmp_path}; echo $$ > $RANK; [ $RANK = 1 ] || exec sleep 600; "
    script += f"until [ -s 0 ] && [ -s 2 ]; do sleep 0.02; done; {end}"
    done = run("-n", "3", "sh", "-c", script)
    assert done.returncode == code
    assert "Rank 1 on " in done.stderr
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(3)]
    wait_until(lambda: not any(map(runs, pids)), "all ranks end")


def test_g5_a_signal_reaches_all_ranks():
    script = 'trap "echo got; exit 0" TERM; echo ready; while :; do sleep 0.05; done'
    process = subprocess.Popen([*COMMAND, "-n", "2", "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    begun = {process.stdout.readline() for _ in range(2)}
    assert begun == {"[rank 0] ready\n", "[rank 1] ready\n"}
    process.terminate()
    out, _ = process.communicate(timeout=120)
    assert sorted(out.splitlines()) == ["[rank 0] got", "[rank 1] got"]
    assert process.returncode == 0


def test_a_crash_in_compiled_code_shows_its_place(tmp_path):
    (tmp_path / "crash.py").write_text("import ctypes\nctypes.string_at(0)\n")
    done = run("-n", "1", sys.executable, str(tmp_path / "crash.py"))
    assert done.returncode == 128 + signal.SIGSEGV
    assert "killed by SIGSEGV: crashed (crash.py:2 in <module>)" in done.stderr
    assert "Fatal Python error: Segmentation fault" in done.stderr


@pytest.mark.distributed
def test_plain_torch_and_distributon_find_each_other(tmp_path, forked_python):
    (tmp_path / "reduce.py").write_text(REDUCE)
    done = run("-n", "4", "--nodes", "2", forked_python, str(tmp_path / "reduce.py"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {r}] 10 {r} 4 {r % 2} 1" for r in range(4)]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["ls"], EXIT_USAGE, "needs a number of ranks"),
        (["-n", "2"], EXIT_USAGE, "needs a program"),
        (["-n", "two", "ls"], EXIT_CONFIG, "-n needs a whole number of at least 1, not two"),
        (["-n", "0", "ls"], EXIT_CONFIG, "-n needs a whole number of at least 1, not 0"),
        (["-np", "-1", "ls"], EXIT_CONFIG, "-n needs a whole number of at least 1, not -1"),
        (["-n", "2", "--nodes", "0", "ls"], EXIT_CONFIG, "--nodes needs a whole number of at least 1, not 0"),
        (
            ["-n", "1000", "ls"],
            EXIT_CONFIG,
            "2 CPUs, for at most 64 ranks. Use -n 64 or fewer",
        ),
        (["-n", "2", "--lr", "3", "ls"], EXIT_USAGE, "Flags of the program follow"),
        (
            ["-n", "3", "--nodes", "2", "ls"],
            EXIT_CONFIG,
            "Use a multiple of the number of nodes, such as -n 2",
        ),
        (["-n", "2", "/tmp"], EXIT_CONFIG, "/tmp is a folder, not a program"),
        (["-n", "2", "no-such"], EXIT_CONFIG, "There is no program 'no-such'"),
        (["-n", "2", "fit.py"], EXIT_CONFIG, "fit.py is not executable. Use `python fit.py`."),
    ],
)
def test_a_wrong_command_line_starts_nothing(words, code, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "fit.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "usable_cpus", lambda: 2)
    assert main(["exec", *words]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "nodes", "refused"),
    [
        ({"SLURM_JOB_CPUS_PER_NODE": "1"}, 1, "allocation has 1 CPU, .*Use -n 64 or fewer"),
        (
            {"SLURM_JOB_CPUS_PER_NODE": "64(x2),2"},
            2,
            "allocation has 2 CPUs.*Use -n 128 or fewer",
        ),
        ({"SLURM_JOB_CPUS_PER_NODE": "64(x2)"}, 2, ""),
        ({}, 1, ""),
    ],
)
def test_the_processors_of_an_allocation_limit_its_ranks(environ, nodes, refused, tmp_path, monkeypatch):
    allocation = {"SLURM_JOB_ID": "81", "SLURM_JOB_NUM_NODES": str(nodes), **environ}
    monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path), **allocation})
    with pytest.raises(SlurmddpError, match=refused or "no srun on PATH"):
        run_ranks([sys.executable], 1000, nodes)


def test_the_first_node_names_a_port_that_is_free(monkeypatch, capsys):
    for name, value in emulated_step(1, 0, "81", Path("/run"), 0).items():
        monkeypatch.setenv(name, value)
    first, second = candidate_ports(f"{detect(os.environ).launch_id} exec")[:2]
    with socket.create_server(("127.0.0.1", first)):
        assert exec_main([]) == 0
    assert capsys.readouterr().out.split() == [str(second)]
