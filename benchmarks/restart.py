"""Measures the time from the death of a rank to the next completed step of all ranks, beside torchrun.

    python benchmarks/restart.py [--rounds N] [--sizes 1x2 1x4 2x2]

A small training (gloo, DistributedDataParallel, AdamW) saves its state after every step. In step 5 the last
rank ends itself by SIGKILL, once. In turn in every round:

torchrun           --max-restarts=3 --monitor-interval=0.1
torchrun default   --max-restarts=3, with torchrun's own interval
slurmddp           the agents, which start the ranks again in place

Under torchrun rank 0 saves by torch.save without a flush to the disk, its best case; under slurmddp by
`Distributon.save(wait=False)`. torchrun 2.13 keeps one store for all its restarts, in which the ranks that
begin again may find the addresses of those that are gone, and hang; so it is told not to
(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1). A time ends when every rank has completed a step after the one in
which the rank died: all ranks run on one machine and read one clock. Sizes are NODESxRANKS; one node is this
machine, several are hosts of a sandbox (network namespaces, as root), where srun starts one torchrun
(rendezvous c10d) or one agent on each. 1x1gpu, added where torch sees a GPU, trains there, over NCCL under
torchrun; all others hide the GPUs. Ratios are medians of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from slurmddp.environments.present import emulated_step, scrub
from slurmddp.runs.folder import RunFolder
from slurmddp.slurm.sandbox import Sandbox

RESULTS = Path(__file__).parent / "results" / "restart.json"
LIMIT = 0.1
"""What slurmddp may take of torchrun's time."""
LIMIT_S = 180
"""For one training that hangs."""
DIES_IN, LAST = 5, 10
WAYS = ("torchrun", "torchrun default", "slurmddp")

STEP = f"""
import os, signal, time
from pathlib import Path
import torch
from torch import nn

LAST = {LAST}
STAMPS = Path(os.environ["BENCHMARK_STAMPS"])

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))

def stamp(name, text):
    descriptor = os.open(STAMPS / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{{text}} {{time.monotonic()!r}}\\n".encode())
    os.close(descriptor)

def take(model, optimizer, step):
    device = next(model.parameters()).device
    inputs, targets = torch.randn(16, 32), torch.randint(8, (16,))
    loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
    loss.backward()
    rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    if step == {DIES_IN} and rank == last and not (STAMPS / "death").exists():
        stamp("death", step)
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()
    stamp(f"rank-{{rank}}", step)
"""
PLAIN = """
import os, sys
import torch
from bench_step import LAST, model, take

has_gpu = torch.cuda.is_available()
if has_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl" if has_gpu else "gloo")
ddp = torch.nn.parallel.DistributedDataParallel(model().cuda() if has_gpu else model())
optimizer = torch.optim.AdamW(ddp.parameters())
file, step = sys.argv[1], 0
if os.path.exists(file):
    state = torch.load(file)
    ddp.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < LAST:
    step += 1
    take(ddp, optimizer, step)
    if torch.distributed.get_rank() == 0:
        state = {"model": ddp.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, file + ".new")
        os.rename(file + ".new", file)
torch.distributed.barrier()
os._exit(0)  # what comes after the last step is not measured, and gloo may abort in it
"""
OURS = """
import torch
from bench_step import LAST, model, take

def train(distributon, config, folder):
    ddp = distributon.setup_model(model())
    optimizer = distributon.setup_optimizer(torch.optim.AdamW(ddp.parameters()))
    objects = {"model": ddp, "optimizer": optimizer}
    step = distributon.load(folder.checkpoints_dir, **objects) or 0
    while step < LAST:
        step += 1
        take(ddp, optimizer, step)
        distributon.save(folder.checkpoints_dir, step, wait=False, **objects)
"""


@dataclass(frozen=True)
class Size:
    nodes: int
    ranks: int
    """On each node."""
    on_gpu: bool = False

    @classmethod
    def read(cls, text: str) -> Size:
        nodes, ranks = text.removesuffix("gpu").split("x")
        return cls(int(nodes), int(ranks), text.endswith("gpu"))

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks}{'gpu' * self.on_gpu}"

    @property
    def environ(self) -> dict[str, str]:
        return {} if self.on_gpu else {"CUDA_VISIBLE_DEVICES": ""}


def default_sizes() -> list[Size]:
    """Return what is measured unless sizes are named."""
    import torch

    return [Size(1, 2), Size(1, 4), Size(2, 2)] + [Size(1, 1, on_gpu=True)] * torch.cuda.is_available()


@dataclass(frozen=True)
class Site:
    """Where commands are started: on this machine, or as the steps of one job."""

    environ: Mapping[str, str]
    hosts: tuple[str, ...] = ()
    job: str = ""

    def command(self, words: list[str]) -> list[str]:
        if not self.job:
            return words
        count = str(len(self.hosts))
        step = ["srun", f"--jobid={self.job}", "--overlap", f"--nodes={count}", f"--ntasks={count}"]
        return [*step, "--mpi=none", "--kill-on-bad-exit=1", "--export=ALL", *words]


def torchrun(size: Size, folder: Path, site: Site, options: Sequence[str]) -> list[str]:
    if site.job:
        meeting = [f"--rdzv-endpoint={site.hosts[0]}:29511", "--rdzv-backend=c10d"]
        meeting.append(f"--rdzv-id={secrets.token_hex(4)}")
    else:
        meeting = ["--standalone"]
    words = [
        f"--nnodes={size.nodes}",
        f"--nproc-per-node={size.ranks}",
        *meeting,
        "--max-restarts=3",
        *options,
    ]
    state = tempfile.mktemp(suffix=".pt", dir=folder)
    return [sys.executable, "-m", "torch.distributed.run", *words, str(folder / "plain.py"), state]


def run_folder(size: Size, folder: Path) -> RunFolder:
    """Return a fresh run folder, as `slurmddp train` would have left it."""
    run = RunFolder(Path(tempfile.mkdtemp(prefix="run-", dir=folder)) / "restart-00000000")
    run.path.mkdir()
    config = {
        "nodes": size.nodes,
        "ranks_per_node": size.ranks,
        "project_dir": str(folder),
        "strategy": {"name": "ddp"},
        "program": {"_target_": "ours.train"},
        "policy": {"max_restarts_in_place": 3},
    }
    run.config_file.write_text(yaml.safe_dump(config))
    run.log_dir(0).mkdir(parents=True)
    return run


def processes(
    way: str, size: Size, folder: Path, site: Site
) -> tuple[list[str], dict[str, str], Path | None]:
    """Return the command of one way, what to lay over its environment, and where its logs are."""
    if way != "slurmddp":
        options = ["--monitor-interval=0.1"] if way == "torchrun" else []
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return site.command(torchrun(size, folder, site, options)), own, None
    run = run_folder(size, folder)
    own = {
        "SLURMDDP_RUN_DIR": str(run.path),
        "SLURMDDP_ATTEMPT": "0",
        "SLURMDDP_SECRET": secrets.token_hex(16),
    }
    if not site.job:
        own |= emulated_step(1, 0, "local-benchmark", run.path, 0)
    return (
        site.command([sys.executable, "-m", "slurmddp.launchers.agent", str(run.path)]),
        own,
        run.log_dir(0),
    )


def measure(way: str, size: Size, folder: Path, site: Site) -> float:
    """Return the seconds from the death of a rank to the next step that all ranks have completed."""
    stamps = Path(tempfile.mkdtemp(prefix="stamps-", dir=folder))
    command, own, logs = processes(way, size, folder, site)
    environ = {**site.environ, **own, "BENCHMARK_STAMPS": str(stamps), "OMP_NUM_THREADS": "1"}
    environ |= size.environ
    with (stamps / "log").open("ab") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        if code := process.wait(timeout=LIMIT_S):
            raise ValueError(f"it ended with {code}")
        return time_between(stamps, size.nodes * size.ranks)
    except (ValueError, OSError, subprocess.TimeoutExpired) as error:
        said = [(stamps / "log").read_text()]
        said += (
            [f"--- {file.name}\n{file.read_text()}" for file in sorted(logs.glob("*.log"))] if logs else []
        )
        raise SystemExit(f"{way}, {size}: {error}\n" + "\n".join(said)) from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def time_between(stamps: Path, ranks: int) -> float:
    """Return the time from the death to the last rank's first step after the one in which it came."""
    (death,) = read_stamps(stamps / "death")
    ends = []
    for rank in range(ranks):
        steps = read_stamps(stamps / f"rank-{rank}")
        ends.append(min(at for step, at in steps if step > death[0]))
        if steps[-1][0] != LAST:
            raise ValueError(f"rank {rank} did not come to its end")
    return max(ends) - death[1]


def read_stamps(file: Path) -> list[tuple[int, float]]:
    lines = [line.split() for line in file.read_text().splitlines()]
    return [(int(step), float(at)) for step, at in lines]


@contextmanager
def cluster(folder: Path, nodes: int) -> Iterator[Site]:
    """Yield one job of a SLURM that lives as long as it is needed."""
    sandbox = Sandbox(f"restart{os.getpid()}", root=folder / f"sandbox{nodes}", nodes=nodes, cpus=4)
    sandbox.up()
    try:
        environ = sandbox.environment(scrub(os.environ))
        asked = ["salloc", "--no-shell", f"--nodes={nodes}", "--exclusive", "--time=120"]
        said = subprocess.run(asked, env=environ, check=True, capture_output=True, text=True).stderr
        job = said.split("job allocation")[1].split()[0]
        yield Site(environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(folder)}, sandbox.nodes, job)
    finally:
        sandbox.down()


def compare(times: Mapping[str, list[float]]) -> dict[str, object]:
    """Return medians, and slurmddp's ratio to both of torchrun's ways round by round."""
    ratios = {
        way: statistics.median(own / other for own, other in zip(times["slurmddp"], times[way], strict=True))
        for way in WAYS[:2]
    }
    return {
        "medians_s": {way: round(statistics.median(values), 3) for way, values in times.items()},
        "slurmddp_to": {way: round(ratio, 4) for way, ratio in ratios.items()},
        "times_s": {way: [round(value, 3) for value in values] for way, values in times.items()},
    }


def measure_size(size: Size, folder: Path, site: Site, rounds: int) -> dict[str, object]:
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in WAYS:
            taken = measure(way, size, folder, site)
            if number:  # the first round fills the caches of the file system
                times[way].append(taken)
    result = compare(times)
    print(f"\n{size}: {size.nodes} node(s), {size.ranks} rank(s) on each ({rounds} rounds)")
    for way, values in times.items():
        print(f"  {way:<18}{statistics.median(values):8.3f} s   ({min(values):.3f} to {max(values):.3f})")
    print(f"  slurmddp's time is {result['slurmddp_to']} of theirs", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    parser.add_argument("--sizes", type=Size.read, nargs="+", help="default: 1x2 1x4 2x2")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="slurmddp-restart-"))
    found: dict[str, dict[str, object]] = {}
    try:
        for name, text in (("bench_step.py", STEP), ("plain.py", PLAIN), ("ours.py", OURS)):
            (folder / name).write_text(text)
        here = Site(scrub(os.environ) | {"PYTHONPATH": str(folder)})
        for size in asked.sizes or default_sizes():
            if size.nodes == 1:
                found[str(size)] = measure_size(size, folder, here, asked.rounds)
                continue
            with cluster(folder, size.nodes) as job:
                found[str(size)] = measure_size(size, folder, job, asked.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ratios = [ratio for one in found.values() for ratio in one["slurmddp_to"].values()]  # type: ignore[attr-defined]
    held = max(ratios) <= LIMIT
    about = {
        "held": held,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "rounds": asked.rounds,
    }
    RESULTS.write_text(json.dumps({**found, **about, "date": time.strftime("%Y-%m-%d")}, indent=1) + "\n")
    print(f"\nslurmddp takes at most {LIMIT} of torchrun's time: {'yes' if held else 'no'}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
