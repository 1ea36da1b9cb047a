"""Measures the time from the command to the first completed training step, beside torchrun.

    python benchmarks/start.py [--rounds N] [--ranks 2 4] [--local | --sandbox]

Four ways to start the same small training (gloo, DistributedDataParallel, AdamW, one step), in turn:

torchrun          torchrun --nproc-per-node=N on a plain script
by hand           the plain script N times, with the variables of the rendezvous set
slurmddp          the agent, on a function of a project (`program._target_`)
slurmddp script   the agent, on a script of one's own (`program.script`)

Locally each is a plain process; on the cluster, a sandbox that the benchmark starts and takes down, each is
what one srun starts. A time ends when the last rank has written its stamp, right after `optimizer.step()`.
Each way imports what it imports once per process that does: slurmddp's agent once per node, the others once
per rank. Ratios are medians of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from slurmddp.environments.present import emulated_step, scrub
from slurmddp.runs.folder import RunFolder
from slurmddp.slurm.sandbox import Sandbox

RESULTS = Path(__file__).parent / "results" / "start.json"
LIMIT = 0.5
"""What slurmddp may take of torchrun's time."""
Commands = list[list[str]]
Environs = list[dict[str, str]]
WAYS = ("torchrun", "by hand", "slurmddp", "slurmddp script")

STEP = """
import os, time
from pathlib import Path
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))

def step(model, optimizer):
    loss = nn.functional.cross_entropy(model(torch.randn(16, 32)), torch.randint(8, (16,)))
    loss.backward()
    optimizer.step()
    stamp = Path(os.environ["BENCHMARK_STAMPS"]) / os.environ["RANK"]
    stamp.with_suffix(".new").write_text(repr(time.time()))
    stamp.with_suffix(".new").rename(stamp)
"""
PLAIN = """
import os
if "RANK" not in os.environ:  # by hand under srun
    os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=os.environ["SLURM_NTASKS"])
import torch
from bench_step import model, step

torch.distributed.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(model())
step(ddp, torch.optim.AdamW(ddp.parameters()))
os._exit(0)  # what comes after the step is not measured, and gloo may abort in it
"""
OURS = """
import torch
from bench_step import model, step
from slurmddp import Distributon

def train(distributon, config=None, folder=None):
    ddp = distributon.setup_model(model())
    step(ddp, distributon.setup_optimizer(torch.optim.AdamW(ddp.parameters())))

if __name__ == "__main__":
    with Distributon() as distributon:
        distributon.launch()
        train(distributon)
"""


@dataclass(frozen=True)
class Site:
    """Where commands are started: on this machine, or as the steps of one job."""

    environ: Mapping[str, str]
    job: str | None = None

    def start(
        self, commands: list[list[str]], environs: list[dict[str, str]]
    ) -> list[subprocess.Popen[bytes]]:
        return [
            subprocess.Popen(command, env={**self.environ, **own}, stderr=subprocess.STDOUT, stdout=log)
            for command, own in zip(commands, environs, strict=True)
            for log in [(Path(own["BENCHMARK_STAMPS"]) / "log").open("ab")]
        ]

    def srun(self, command: list[str], tasks: int = 1) -> list[str]:
        if self.job is None:
            return command
        step = [
            "srun",
            f"--jobid={self.job}",
            "--overlap",
            "--overcommit",
            "--nodes=1",
            f"--ntasks={tasks}",
            "--mpi=none",
        ]
        return [*step, "--kill-on-bad-exit=1", "--export=ALL", *command]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_folder(folder: Path, ranks: int, program: dict[str, object]) -> RunFolder:
    """Return a fresh run folder, as `slurmddp train` would have left it."""
    run = RunFolder(Path(tempfile.mkdtemp(prefix="run-", dir=folder)) / "start-00000000")
    run.path.mkdir()
    config = {
        "nodes": 1,
        "ranks_per_node": ranks,
        "project_dir": str(folder),
        "strategy": {"name": "ddp"},
        "program": program,
    }
    run.config_file.write_text(yaml.safe_dump(config))
    run.log_dir(0).mkdir(parents=True)
    return run


def processes(way: str, ranks: int, folder: Path, site: Site) -> tuple[Commands, Environs]:
    """Return the commands of one way to start, and what to lay over their environments."""
    plain = [sys.executable, str(folder / "plain.py")]
    if way == "torchrun":
        options = [f"--nproc-per-node={ranks}", "--nnodes=1", "--standalone"]
        return [site.srun([sys.executable, "-m", "torch.distributed.run", *options, plain[1]])], [{}]
    if way == "by hand":
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if site.job is not None:
            return [site.srun(plain, ranks)], [meeting]
        places = [
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)
        ]
        return [plain] * ranks, [meeting | place for place in places]
    program = {"script": "ours.py"} if way == "slurmddp script" else {"_target_": "ours.train"}
    run = run_folder(folder, ranks, program)
    own = {"SLURMDDP_RUN_DIR": str(run.path), "SLURMDDP_ATTEMPT": "0"}
    if site.job is None:
        own = emulated_step(1, 0, "local-benchmark", run.path, 0)
    return [site.srun([sys.executable, "-m", "slurmddp.launchers.agent", str(run.path)])], [own]


def measure(way: str, ranks: int, folder: Path, site: Site) -> float:
    """Return the seconds from the command to the last rank's first completed step."""
    stamps = Path(tempfile.mkdtemp(prefix="stamps-", dir=folder))
    commands, environs = processes(way, ranks, folder, site)
    environs = [own | {"BENCHMARK_STAMPS": str(stamps)} for own in environs]
    started = time.time()
    codes = [process.wait(timeout=300) for process in site.start(commands, environs)]
    if any(codes):
        raise SystemExit(f"{way} ended with {codes}:\n{(stamps / 'log').read_text()}")
    return max(float((stamps / str(rank)).read_text()) for rank in range(ranks)) - started


@contextmanager
def cluster(folder: Path) -> Iterator[Site]:
    """Yield one job of a SLURM that lives as long as the benchmark."""
    sandbox = Sandbox(f"start{os.getpid()}", root=folder / "sandbox", nodes=1, cpus=os.cpu_count() or 2)
    sandbox.up()
    try:
        environ = sandbox.environment(scrub(os.environ))
        asked = ["salloc", "--no-shell", "--nodes=1", "--exclusive", "--time=60"]
        said = subprocess.run(asked, env=environ, check=True, capture_output=True, text=True).stderr
        job = said.split("job allocation")[1].split()[0]
        yield Site(environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(folder)}, job)
    finally:
        sandbox.down()


def compare(times: Mapping[str, list[float]]) -> dict[str, object]:
    """Return medians, and the ratio to torchrun round by round."""
    ratios = {
        way: statistics.median(
            own / torchrun for own, torchrun in zip(times[way], times["torchrun"], strict=True)
        )
        for way in WAYS[1:]
    }
    return {
        "medians_s": {way: round(statistics.median(values), 3) for way, values in times.items()},
        "to_torchrun": {way: round(ratio, 3) for way, ratio in ratios.items()},
        "times_s": {way: [round(value, 3) for value in values] for way, values in times.items()},
    }


def measure_site(where: str, folder: Path, site: Site, ranks: list[int], rounds: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for count in ranks:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(rounds + 1):
            for way in WAYS:
                taken = measure(way, count, folder, site)
                if number:  # the first round fills the caches of the file system
                    times[way].append(taken)
        result = compare(times)
        found[str(count)] = result
        print(f"\n{where}, {count} ranks ({rounds} rounds)")
        for way in WAYS:
            ratio = result["to_torchrun"].get(way, 1.0)  # type: ignore[attr-defined]
            print(f"  {way:<18}{statistics.median(times[way]):7.2f} s{ratio:8.2f}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--local", action="store_true", help="without SLURM")
    only.add_argument("--sandbox", action="store_true", help="under srun only")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # not without taking the sandbox down
    folder = Path(tempfile.mkdtemp(prefix="slurmddp-start-"))
    found: dict[str, object] = {}
    try:
        for name, text in (("bench_step.py", STEP), ("plain.py", PLAIN), ("ours.py", OURS)):
            (folder / name).write_text(text)
        if not asked.sandbox:
            here = Site(scrub(os.environ) | {"PYTHONPATH": str(folder)})
            found["local"] = measure_site("this machine", folder, here, asked.ranks, asked.rounds)
        if not asked.local:
            with cluster(folder) as job:
                found["srun"] = measure_site("srun", folder, job, asked.ranks, asked.rounds)
    finally:
        shutil.rmtree(folder)
    held = all(
        one["to_torchrun"]["slurmddp"] <= LIMIT  # type: ignore[index]
        for site in found.values()
        for one in site.values()  # type: ignore[attr-defined]
    )
    about = {
        "held": held,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "rounds": asked.rounds,
    }
    RESULTS.write_text(json.dumps({**found, **about}, indent=1) + "\n")
    print(f"\nslurmddp takes at most {LIMIT} of torchrun's time: {'yes' if held else 'no'}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
