"""One script, unchanged, started in every way: equal ranks, equal weights to the last bit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed import run as torchrun

from slurmddp.environments.detect import detect
from slurmddp.environments.emit import emulated_step, rank_environment
from slurmddp.environments.scrub import scrub
from support import TESTS
from support.distributed import exact_jobs
from support.distributed.ranks import Program, run_programs, run_ranks
from support.runs.train_runs import only_run, slurmddp

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]

SCRIPT = str(TESTS / "support" / "distributed" / "spirals.py")


def run(command: Sequence[str], folder: Path) -> None:
    """Run a command to its end, in a process of its own."""
    done = subprocess.run(
        [*command, "--epochs", "2", "--weights", "weights.pt"],
        cwd=folder,
        env={**scrub(os.environ), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 1: loss") == 1, "one rank prints"


def run_tasks(arguments: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path) -> None:
    """Run the script once per environment, side by side, as srun starts its tasks."""
    folder.mkdir(exist_ok=True)
    command = [*arguments, "--epochs", "2", "--weights", "weights.pt"]
    common = {**scrub(os.environ), "OMP_NUM_THREADS": "1"}
    ended = run_programs([Program(command, {**common, **environ}, folder) for environ in environments])
    assert [code for code, _ in ended] == [0] * len(ended), ended
    assert sum(output.count("epoch 1: loss") for _, output in ended) == 1, "one rank prints"


def by_launch(folder: Path) -> None:
    run([sys.executable, SCRIPT, "--devices", "2"], folder)


def by_torchrun(folder: Path) -> None:
    run_tasks([str(torchrun.__file__), "--standalone", "--nproc-per-node=2", SCRIPT], [{}], folder)


def by_torchrun_on_two_nodes(folder: Path) -> None:
    """As `srun --ntasks-per-node=1 torchrun`: the variables of each node's step, and a torchrun in it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = [emulated_step(2, node_rank, "79", folder, 0) for node_rank in range(2)]
    words = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=79"]
    run_tasks([str(torchrun.__file__), *words, f"--rdzv-endpoint={endpoint}", SCRIPT], nodes, folder)


def by_mpiexec(folder: Path) -> None:
    """The mpiexec of MPICH. Its variables do not name the launch; the script uses no MPI."""
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    run([mpiexec, "-n", "2", sys.executable, SCRIPT], folder)


def by_srun_one_task_per_rank(folder: Path) -> None:
    step = emulated_step(1, 0, "77", folder, 0)
    node = detect(step)
    places = [{**step, **rank_environment(node, local_rank, 2)} for local_rank in range(2)]
    for place in places:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"):
            del place[name]  # srun knows nothing of torch's variables.
    run_tasks([SCRIPT], places, folder)


def by_srun_on_two_nodes(folder: Path) -> None:
    steps = [emulated_step(2, node_rank, "78", folder, 0) for node_rank in range(2)]
    run_tasks([SCRIPT, "--devices", "1"], steps, folder)


def by_agent(folder: Path) -> None:
    """A run of `slurmddp train`: the agent forks the ranks, and each runs the script."""
    arguments = "program.args=[--epochs,2,--weights,weights.pt,--checkpoints,'{run_dir}/checkpoints']"
    slurmddp(folder, "train", f"program.script={SCRIPT}", arguments, "name=script")
    assert (only_run(folder).checkpoints_dir / "latest").is_file()


ROUTES: list[Callable[[Path], None]] = [
    by_launch,
    by_torchrun,
    by_torchrun_on_two_nodes,
    by_mpiexec,
    by_srun_one_task_per_rank,
    by_srun_on_two_nodes,
    by_agent,
]


def trained(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    return weights


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("launched")
    by_launch(folder)
    return trained(folder)


@pytest.mark.parametrize("route", ROUTES[1:], ids=lambda route: route.__name__)
def test_d4_t2_two_ranks_are_two_ranks_under_every_launcher(
    tmp_path: Path, launched: dict[str, torch.Tensor], route: Callable[[Path], None]
) -> None:
    route(tmp_path)
    found = trained(tmp_path)
    assert found.keys() == launched.keys()
    assert all(torch.equal(found[name], launched[name]) for name in found)
    assert not any(name.startswith("module.") for name in found)


PLAIN_TORCH = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
if dist.get_rank() == 0:
    open("total", "w").write(f"{total.item():g} of {dist.get_world_size()}")
dist.destroy_process_group()
"""


def test_a_script_of_plain_torch_meets_as_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN_TORCH)
    slurmddp(tmp_path, "train", "program.script=plain.py", "name=plain", "nodes=2", "ranks_per_node=1")
    assert (tmp_path / "total").read_text() == "3 of 2"


def test_plain_python_is_one_rank(tmp_path: Path, launched: dict[str, torch.Tensor]) -> None:
    for number in (1, 2):
        run_tasks([SCRIPT, "--devices", "1"], [{"CUDA_VISIBLE_DEVICES": ""}], tmp_path / str(number))
    first, second = trained(tmp_path / "1"), trained(tmp_path / "2")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first.keys() == launched.keys()
    assert not all(torch.equal(first[name], launched[name]) for name in first), (
        "two ranks take larger batches"
    )


def test_a_script_that_stops_at_the_end_of_an_epoch_resumes(tmp_path: Path) -> None:
    """20 steps of two ranks are an epoch; stopped after its last, then after the first of the next."""
    for name, stops in (("whole", [None]), ("parts", [20, 1, None])):
        options = ["--epochs", "3", "--checkpoints", str(tmp_path / name), "--devices", "2"]
        for stop in stops:
            arguments = [SCRIPT, *options, "--weights", str(tmp_path / f"{name}.pt")]
            codes = run_ranks(exact_jobs.script_that_stops_after, 2, arguments, stop)
            assert codes == ([75, 75] if stop else [0, 0])
    whole, parts = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "parts"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
