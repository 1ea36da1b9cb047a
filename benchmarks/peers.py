"""Shared parts of the benchmarks beside torchrun: sizes, sites, the start and the end of a training."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from slurmddp.environments.emit import emulated_step
from slurmddp.environments.scrub import scrub
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.sandbox import Sandbox

MODEL = """
import os, signal, time
from pathlib import Path
import torch
from torch import nn

STAMPS = Path(os.environ["BENCHMARK_STAMPS"])

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))

def replicas():
    if not torch.cuda.is_available():
        torch.distributed.init_process_group("gloo")
        return nn.parallel.DistributedDataParallel(model())
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.distributed.init_process_group("nccl")
    return nn.parallel.DistributedDataParallel(model().cuda())

def backward(model):
    device = next(model.parameters()).device
    inputs = torch.randn(16, 32).to(device)
    targets = torch.randint(8, (16,)).to(device)
    nn.functional.cross_entropy(model(inputs), targets).backward()

def finish(optimizer):
    optimizer.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
"""
"""The module `bench_model` of each training: a small model and the parts of its step."""
LIMIT_S = 180
"""Seconds after which a training counts as hanging."""
END_S = 40
"""Seconds for a training to end. torchrun gives its ranks, which have sessions of their own, 30 s."""


@dataclass(frozen=True)
class Size:
    """The number of nodes and ranks of a training, and its kind of device."""

    nodes: int
    ranks: int
    """The ranks of each node."""
    on_gpu: bool = False

    @classmethod
    def read(cls, text: str) -> Size:
        """Return the size of `2x4`, or of `1x1gpu`."""
        nodes, ranks = text.removesuffix("gpu").split("x")
        return cls(int(nodes), int(ranks), text.endswith("gpu"))

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks}{'gpu' * self.on_gpu}"

    @property
    def environ(self) -> dict[str, str]:
        """Variables of the ranks: they hide the GPUs from a training on CPUs."""
        if self.on_gpu:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ""}


def sizes(named: Sequence[Size] | None, on_cpus: Sequence[Size], gpus: int) -> list[Size]:
    """Return the sizes to measure.

    Args:
        named: the sizes of the command line; None if it names none.
        on_cpus: the default sizes. One rank on a GPU joins them where torch sees a GPU.
        gpus: the number of GPUs that torch sees.
    """
    if named is None:
        if not gpus:
            return list(on_cpus)
        return [*on_cpus, Size(1, 1, on_gpu=True)]
    if not gpus and any(size.on_gpu for size in named):
        raise SystemExit("A size on a GPU was named, and torch sees none here.")
    return list(named)


def visible_gpus() -> int:
    """Return the number of GPUs that torch can use on this machine."""
    import torch

    if not torch.cuda.is_available():
        return 0
    return torch.cuda.device_count()


@contextmanager
def workplace(name: str, files: Mapping[str, str]) -> Iterator[Path]:
    """Yield a folder with these files and the model; it is removed afterwards, also after SIGTERM."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix=f"slurmddp-{name}-"))
    try:
        for file, text in {"bench_model.py": MODEL, **files}.items():
            (folder / file).write_text(text)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Site:
    """The place where commands run: this machine, or the nodes of a job."""

    environ: Mapping[str, str]
    hosts: tuple[str, ...] = ()
    job: str = ""

    def command(self, task: list[str], tasks: int | None = None) -> list[str]:
        """Return the command that runs a task at this site.

        Args:
            task: the command of one task.
            tasks: the number of tasks, which may exceed the CPUs; None for one task on each node.
        """
        if not self.job:
            return task

        shape = [f"--nodes={len(self.hosts)}", f"--ntasks={tasks or len(self.hosts)}"]
        if tasks is not None:
            shape.append("--overcommit")
        step = ["srun", f"--jobid={self.job}", "--overlap", *shape]
        return [*step, "--mpi=none", "--kill-on-bad-exit=1", "--export=ALL", *task]


def this_machine(folder: Path) -> Site:
    """Return this machine as a site whose Python imports the files of `folder`."""
    return Site(scrub(os.environ) | {"PYTHONPATH": str(folder)})


@contextmanager
def cluster(name: str, folder: Path, nodes: int, cpus: int) -> Iterator[Site]:
    """Yield a job with all nodes of a new sandbox; the sandbox ends afterwards."""
    sandbox = Sandbox(f"{name}{os.getpid()}", root=folder / f"sandbox{nodes}", nodes=nodes, cpus=cpus)
    sandbox.up()
    try:
        environ = sandbox.environment(scrub(os.environ))
        command = ["salloc", "--no-shell", f"--nodes={nodes}", "--exclusive", "--time=120"]
        output = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stderr
        job_id = output.split("job allocation")[1].split()[0]
        yield Site(environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(folder)}, sandbox.nodes, job_id)
    finally:
        sandbox.down()


@dataclass(frozen=True)
class Training:
    """The commands of one training, started side by side, and the variables added to their environments."""

    way: str
    commands: list[tuple[list[str], dict[str, str]]]
    logs: Path | None = None
    """The folder of its logs, if its processes don't write to their standard output."""


def torchrun(size: Size, *arguments: str) -> list[str]:
    """Return the command of torchrun.

    Args:
        size: the nodes and ranks.
        arguments: options, such as the rendezvous of several nodes; then the script and its arguments.
    """
    options = [f"--nnodes={size.nodes}", f"--nproc-per-node={size.ranks}"]
    if size.nodes == 1:
        options.append("--standalone")
    return [sys.executable, "-m", "torch.distributed.run", *options, *arguments]


def agents(size: Size, folder: Path, site: Site, tasks: int | None = None, **settings: object) -> Training:
    """Return slurmddp's training in a new run folder, as `slurmddp train` would have written it.

    Args:
        size: the nodes and ranks.
        folder: the project, with the files of the training.
        site: the place of the agents.
        tasks: the number of agents, if it differs from the number of nodes.
        settings: further keys of the run's configuration.
    """
    run = RunFolder(Path(tempfile.mkdtemp(prefix="run-", dir=folder)) / "benchmark-00000000")
    run.path.mkdir()
    config = {
        "nodes": size.nodes,
        "ranks_per_node": size.ranks,
        "project_dir": str(folder),
        "strategy": {"name": "ddp"},
        **settings,
    }
    run.config_file.write_text(yaml.safe_dump(config))
    run.log_dir(0).mkdir(parents=True)

    environ = {
        "SLURMDDP_RUN_DIR": str(run.path),
        "SLURMDDP_ATTEMPT": "0",
        "SLURMDDP_SECRET": secrets.token_hex(16),
    }
    if not site.job:
        environ |= emulated_step(1, 0, "local-benchmark", run.path, 0)
    command = [sys.executable, "-m", "slurmddp.launchers.agent", str(run.path)]
    return Training("slurmddp", [(site.command(command, tasks), environ)], run.log_dir(0))


def measure(training: Training, size: Size, folder: Path, site: Site, read: Callable[[Path], float]) -> float:
    """Run a training to its end and return the figure that `read` takes from its stamps.

    In no case does a process of the training outlive this call.

    Args:
        training: the training.
        size: the nodes and ranks.
        folder: the folder for stamps and logs.
        site: the place of the training.
        read: returns a figure from the folder of the stamps.

    Raises:
        SystemExit: the training failed. The message holds its output and logs.
    """
    stamps = Path(tempfile.mkdtemp(prefix="stamps-", dir=folder))
    shared = {**site.environ, **size.environ, "BENCHMARK_STAMPS": str(stamps)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with (stamps / "log").open("ab") as log:
            for command, variables in training.commands:
                environ = shared | variables
                process = subprocess.Popen(
                    command, env=environ, stdout=log, stderr=log, start_new_session=True
                )
                processes.append(process)
        codes = [process.wait(timeout=LIMIT_S) for process in processes]
        if any(codes):
            raise ValueError(f"it ended with {codes}")
        return read(stamps)
    except (ValueError, OSError, subprocess.TimeoutExpired) as error:
        report = [f"{training.way}, {size}: {error}", *_outputs(training, stamps / "log")]
        raise SystemExit("\n".join(report)) from error
    finally:
        end(processes)


def _outputs(training: Training, log: Path) -> list[str]:
    """Return the name and text of each log of a training."""
    files = [log]
    if training.logs is not None:
        files += sorted(training.logs.glob("*.log"))
    return [f"--- {file.name}\n{file.read_text()}" for file in files if file.exists()]


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes and all others of their sessions.

    SIGTERM comes first, because it lets a launcher end its ranks, which have sessions of their own.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
