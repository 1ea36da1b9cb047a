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
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.distributed.init_process_group("nccl" if has_gpu else "gloo")
    return nn.parallel.DistributedDataParallel(model().cuda() if has_gpu else model())

def backward(model):
    device = next(model.parameters()).device
    inputs, targets = torch.randn(16, 32), torch.randint(8, (16,))
    nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device)).backward()

def finish(optimizer):
    optimizer.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
"""
"""The module `bench_model` of each training: a small model and the parts of its step."""
LIMIT_S = 180
"""For one training that hangs."""
END_S = 40
"""For torchrun to end its ranks, which are in sessions of their own; it gives them 30 s."""


@dataclass(frozen=True)
class Size:
    nodes: int
    ranks: int
    """On each node."""
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
        """All trainings but those on a GPU are kept from it."""
        return {} if self.on_gpu else {"CUDA_VISIBLE_DEVICES": ""}


def sizes(named: Sequence[Size] | None, on_cpus: Sequence[Size], gpus: int) -> list[Size]:
    """Return what is measured: what was named, else `on_cpus`, and one rank on a GPU where there is one."""
    if named is None:
        return [*on_cpus, Size(1, 1, on_gpu=True)] if gpus else list(on_cpus)
    if not gpus and any(size.on_gpu for size in named):
        raise SystemExit("A size on a GPU was named, and torch sees none here.")
    return list(named)


def visible_gpus() -> int:
    """Return how many GPUs torch can use here."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@contextmanager
def workplace(name: str, files: Mapping[str, str]) -> Iterator[Path]:
    """Yield a folder with these files and the model, which goes away afterwards, also after SIGTERM."""
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
    """The place of the commands: this machine, or the steps of one job."""

    environ: Mapping[str, str]
    hosts: tuple[str, ...] = ()
    job: str = ""

    def command(self, words: list[str], tasks: int | None = None) -> list[str]:
        """Return what starts `words`: once on each node, or `tasks` times, if need be more than CPUs."""
        if not self.job:
            return words
        step = ["srun", f"--jobid={self.job}", "--overlap", f"--nodes={len(self.hosts)}"]
        step += [f"--ntasks={tasks or len(self.hosts)}", *["--overcommit"] * (tasks is not None)]
        return [*step, "--mpi=none", "--kill-on-bad-exit=1", "--export=ALL", *words]


def this_machine(folder: Path) -> Site:
    return Site(scrub(os.environ) | {"PYTHONPATH": str(folder)})


@contextmanager
def cluster(name: str, folder: Path, nodes: int, cpus: int) -> Iterator[Site]:
    """Yield one job of a SLURM that lives as long as it is needed."""
    sandbox = Sandbox(f"{name}{os.getpid()}", root=folder / f"sandbox{nodes}", nodes=nodes, cpus=cpus)
    sandbox.up()
    try:
        environ = sandbox.environment(scrub(os.environ))
        asked = ["salloc", "--no-shell", f"--nodes={nodes}", "--exclusive", "--time=120"]
        said = subprocess.run(asked, env=environ, check=True, capture_output=True, text=True).stderr
        job = said.split("job allocation")[1].split()[0]
        yield Site(environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(folder)}, sandbox.nodes, job)
    finally:
        sandbox.down()


@dataclass(frozen=True)
class Training:
    """The commands of one training, started side by side, and the variables added to their environments."""

    way: str
    commands: list[tuple[list[str], dict[str, str]]]
    logs: Path | None = None
    """Where its processes write, if not to what they were given."""


def torchrun(size: Size, *words: str) -> list[str]:
    """Return torchrun's command; `words` are where several nodes meet, other options, the script, its own."""
    shape = [f"--nnodes={size.nodes}", f"--nproc-per-node={size.ranks}"]
    meeting = ["--standalone"] if size.nodes == 1 else []
    return [sys.executable, "-m", "torch.distributed.run", *shape, *meeting, *words]


def agents(size: Size, folder: Path, site: Site, tasks: int | None = None, **settings: object) -> Training:
    """Return slurmddp's training in a fresh run folder, as `slurmddp train` would have left it."""
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
    own = {"SLURMDDP_RUN_DIR": str(run.path), "SLURMDDP_ATTEMPT": "0"}
    own["SLURMDDP_SECRET"] = secrets.token_hex(16)
    if not site.job:
        own |= emulated_step(1, 0, "local-benchmark", run.path, 0)
    words = [sys.executable, "-m", "slurmddp.launchers.agent", str(run.path)]
    return Training("slurmddp", [(site.command(words, tasks), own)], run.log_dir(0))


def measure(training: Training, size: Size, folder: Path, site: Site, read: Callable[[Path], float]) -> float:
    """Return what `read` makes of the folder into which a training has put its stamps, once it has ended.

    Ends the benchmark with all that the training wrote if it failed; in no case is any of it left running.
    """
    stamps = Path(tempfile.mkdtemp(prefix="stamps-", dir=folder))
    shared = {**site.environ, **size.environ, "BENCHMARK_STAMPS": str(stamps)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with (stamps / "log").open("ab") as log:
            for words, own in training.commands:
                environ = shared | own
                process = subprocess.Popen(words, env=environ, stdout=log, stderr=log, start_new_session=True)
                processes.append(process)
        codes = [process.wait(timeout=LIMIT_S) for process in processes]
        if any(codes):
            raise ValueError(f"it ended with {codes}")
        return read(stamps)
    except (ValueError, OSError, subprocess.TimeoutExpired) as error:
        files = [stamps / "log", *sorted(training.logs.glob("*.log") if training.logs else [])]
        said = [f"--- {file.name}\n{file.read_text()}" for file in files if file.exists()]
        raise SystemExit("\n".join([f"{training.way}, {size}: {error}", *said])) from error
    finally:
        end(processes)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes with all of their sessions: politely first, for what has a session of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
