"""Every example runs as its page says, only shorter; the four ways to start one training end alike."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from torch.distributed import run as torchrun

from slurmddp.environments.scrub import scrub
from support.distributed.doc_programs import SLOW_FIRST_ATTEMPT, newest_weights
from support.distributed.ranks import Program, free_port, place_environments, run_programs
from support.runs.examples import EXAMPLES, example
from support.runs.train_runs import only_run, slurmddp
from support.slurm.run_processes import ranks_of

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("forked_programs")]

TORCHRUN = [str(torchrun.__file__), "--standalone", "--nproc-per-node=2"]
LADDER = ["01_single", "02_local", "03_torchrun", "04_slurm"]
TUTORIAL = {"02_local": 40, "03_torchrun": 59, "04_slurm": 17}
"""Lines that PyTorch's tutorial on DDP removes and adds from one script to the next."""
PYTHON = sys.executable
"""No fork: a fork has neither the command line by which `ranks_of` finds it nor mpiexec as its parent."""
ENVIRONMENT = {**scrub(os.environ), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(command: Sequence[str], folder: Path) -> str:
    """Run a command to its good end; return its output."""
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_forked(folder: Path, *command: str, ranks: int = 0) -> str:
    """Run a script without a launcher, or as ranks, in forks of a process that has imported torch."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [{**place, **meeting} for place in place_environments(ranks)] if ranks else [{}]
    words = [str(folder / command[0]), *command[1:]]
    ended = run_programs([Program(words, {**ENVIRONMENT, **place}, folder) for place in places])
    assert [code for code, _ in ended] == [0] * len(places), ended
    return "".join(output for _, output in ended)


def tensors(run_folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the model and of the optimizer in the newest checkpoint of a folder."""
    found = load(newest_weights(run_folder))
    return {name: value for name, value in found.items() if name.startswith("objects/")}


def percentages(output: str) -> list[float]:
    return [float(one) for one in re.findall(r"epoch \d+: ([\d.]+)% of the held-out", output)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, torch.Tensor]]]:
    """The output and the final state of each of the four examples after eight epochs."""
    root = tmp_path_factory.mktemp("ladder")
    single, local, third, slurm = (example(name, root) for name in LADDER)
    outputs = [
        run_forked(single, "train.py", "--epochs", "8"),
        run([sys.executable, "train.py", "--epochs", "8"], local),
        run_forked(third, *TORCHRUN, "train.py", "--epochs", "8"),
        slurmddp(slurm, "run", "-n", "2", "train.py", "--epochs", "8"),
    ]
    folders = [single, local, third, only_run(slurm).path]
    return {
        name: (output, tensors(folder)) for name, output, folder in zip(LADDER, outputs, folders, strict=True)
    }


def test_t1_each_rung_changes_fewer_lines_than_the_tutorial() -> None:
    texts = [(EXAMPLES / name / "train.py").read_text().splitlines() for name in LADDER]
    told = {}
    for name, before, after in zip(LADDER[1:], texts[:-1], texts[1:], strict=True):
        changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
        assert 0 < len(changes) < TUTORIAL[name]
        told[name] = len(changes)
    shown = re.findall(r"\| `\w+` to `(\w+)` \| (\d+) \|", (EXAMPLES / "README.md").read_text())
    assert told == {name: int(count) for name, count in shown}


def test_t1_all_rungs_end_with_equal_weights(trained) -> None:
    """Two ranks have equal bits, however they were started; one rank adds up the same samples otherwise."""
    (_, single), (_, local), (_, third), (_, slurm) = (trained[name] for name in LADDER)
    assert single.keys() == local.keys() == third.keys() == slurm.keys()
    for name, value in local.items():
        assert torch.equal(third[name], value) and torch.equal(slurm[name], value), name
        assert torch.allclose(single[name], value, rtol=0, atol=1e-3), name
    assert any(not torch.equal(single[name], value) for name, value in local.items())


def test_t1_all_rungs_learn_and_print_once(trained) -> None:
    for output, _ in trained.values():
        told = percentages(output)
        assert len(told) == 8, "one rank prints"
        assert told[0] < 80 and told[-1] > 90


def test_the_first_example_resumes_where_it_was_and_its_checkpoints_verify(trained, tmp_path: Path) -> None:
    folder = example("01_single", tmp_path)
    outputs = [run_forked(folder, "train.py", "--epochs", epochs) for epochs in ("3", "8")]
    assert [len(percentages(output)) for output in outputs] == [3, 5]
    _, whole = trained["01_single"]
    assert all(torch.equal(value, whole[name]) for name, value in tensors(folder).items())
    assert slurmddp(folder, "checkpoints", "./checkpoints", "--verify").count("verified") == 3


def test_the_plain_program_learns_as_well(tmp_path: Path) -> None:
    folder = example("01_single", tmp_path)
    assert percentages(run_forked(folder, "plain.py", "--epochs", "12"))[-1] > 90


def test_the_gpt_learns(tmp_path: Path) -> None:
    folder = example("05_gpt", tmp_path)
    slurmddp(folder, "train", "name=gpt", "train.steps=16", "train.eval_every=8", "train.eval_batches=2")
    lines = [json.loads(line) for line in only_run(folder).metrics_file.read_text().splitlines()]
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(losses) == 3
    assert losses[0] > 4.0 > 3.8 > losses[-1]
    assert (only_run(folder).path / "report.png").is_file()


def test_the_digits_are_recognised(tmp_path: Path) -> None:
    folder = example("06_images", tmp_path)
    output = slurmddp(folder, "run", "name=digits", "train.py", "--epochs", "6")
    assert percentages(output)[-1] > 95
    assert "accuracy 0.9" in slurmddp(folder, "status", "digits")
    assert (only_run(folder).path / "report.png").is_file()


def test_the_shards_are_trained_on_any_ranks_and_exported(tmp_path: Path) -> None:
    folder = example("12_fsdp", tmp_path)
    outputs = [
        run_forked(folder, "train.py", f"--ranks={ranks}", *words, ranks=ranks)
        for ranks, *words in ((2, "--steps=50"), (3, "--steps=100"), (2, "--strategy=ddp", "--steps=150"))
    ]
    held = [re.findall(r"holds ([\d.]+) MB of weights, ([\d.]+) MB", output) for output in outputs]
    assert [len(ranks) for ranks in held] == [2, 3, 2]
    assert held[0] == [("0.27", "0.53")] * 2 and held[2] == [("0.53", "1.07")] * 2
    assert [re.findall(r"step (\d+): loss", output) for output in outputs] == [["50"], ["100"], ["150"]]
    slurmddp(folder, "export", "./checkpoints", "--step=100", "--output", "weights.safetensors")
    assert load((folder / "weights.safetensors").read_bytes())["0.weight"].shape == (64, 16)


def test_the_own_model_and_data_are_trained(tmp_path: Path) -> None:
    folder = example("07_own_model", tmp_path)
    output = slurmddp(folder, "train", "name=sums", "train.steps=60", "train.eval_every=30", "model.width=64")
    (first, last) = re.findall(r"held-out loss ([\d.]+) -> ([\d.]+)\.", output)[0]
    assert float(first) > 2.4 and float(last) < 1.9
    shutil.rmtree(folder / "runs")
    counted = slurmddp(folder, "train", "program._target_=my_program.count_to", "+program.goal=42")
    assert re.search(r"after 400 steps the error is \S+e-\d\d", counted)


def test_the_own_cluster_gives_the_lines_of_its_page(tmp_path: Path) -> None:
    folder = example("08_cluster", tmp_path)
    output = slurmddp(folder, "train", "+cluster=mine", "nodes=2", "name=first", "--dry-run")
    script, _, summary = output.partition("slurmddp: These lines of the script")
    (shown,) = re.findall(
        r"^```text\n(.*?)^```", (folder / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    left_out = ("srun", "#SBATCH --output", "#SBATCH --open-mode", "#SBATCH --job-name")
    lines = [line.strip() for line in summary.splitlines() if line.startswith("  ")]
    assert [line for line in lines if not line.startswith(left_out)] == shown.splitlines()
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert not (folder / "runs").exists()


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not list(folder.glob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=20)[0]
        time.sleep(0.05)


def start(folder: Path, *words: str, python: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python or sys.executable, "-m", "slurmddp", *words],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def slow_down(script: Path) -> None:
    """Let the first attempt take its time, so that the test can interrupt it."""
    head, text = SLOW_FIRST_ATTEMPT, script.read_text()
    script.write_text(head + text)


def end_after_gloo(script: Path) -> None:
    """Let the ranks end after gloo's threads: torch 2.13 may abort or hang right after a collective."""
    end, text = "    dist.destroy_process_group()\n", script.read_text()
    assert text.count(end) == 1
    wait = "    from slurmddp.host import gloo_threads\n\n    gloo_threads.wait_until_idle()\n"
    script.write_text(text.replace(end, wait + end))


def test_a_stopped_trainer_of_lightning_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    folder = example("09_lightning", tmp_path)
    slow_down(folder / "fit.py")
    own = ["--devices", "2", "--folder", "{run_dir}/lightning", "--epochs", "30"]
    saved = "program.checkpoints='{run_dir}/lightning/last.ckpt'"
    command = ["run", "-n", "2", "name=fit", saved, "fit.py", *own]
    first = start(folder, *command)
    wait_for(folder, "runs/fit-*/lightning/last.ckpt", first)
    slurmddp(folder, "stop", "fit")
    before, _ = first.communicate(timeout=120)
    assert first.returncode == 75, before
    assert re.search(
        "Files match program.checkpoints, but slurmddp can't check them: .*/lightning/last.ckpt", before
    )
    after = slurmddp(folder, *command)
    (last, resumed) = (re.findall(r"^epoch (\d+): loss", text, re.MULTILINE) for text in (before, after))
    assert 0 < int(resumed[0]) <= int(last[-1]) + 1 < 30
    assert resumed[-1] == "29"


def test_an_existing_script_restarts_in_place_and_loses_nothing(tmp_path: Path) -> None:
    folder = example("10_existing_script", tmp_path)
    end_after_gloo(folder / "train.py")
    run_forked(folder, "train.py", "--epochs", "20", "--out", "undisturbed", ranks=2)
    slow_down(folder / "train.py")
    settings = ["program.checkpoints=checkpoints/*.pt", "program.resume_args=--resume"]
    words = [*settings, "program.resumable=true", "train.py", "--epochs", "20"]
    told = start(folder, "run", *words, python=PYTHON)
    wait_for(folder, "checkpoints/newest.pt", told)
    ranks_of(only_run(folder).path)[1].kill()
    output, _ = told.communicate(timeout=120)
    assert told.returncode == 0, output
    assert "restart in place" in output
    epochs = re.findall(r"^epoch (\d+): loss", output, re.MULTILINE)
    assert epochs == [str(epoch) for epoch in range(20) if str(epoch) in epochs], "no epoch is repeated"
    assert epochs[-1] == "19"
    whole, parts = (
        torch.load(folder / name / "newest.pt", weights_only=True)["model"]
        for name in ("undisturbed", "checkpoints")
    )
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


def test_collectives_side_by_side_are_counted_and_equal(tmp_path: Path) -> None:
    folder = example("11_collectives", tmp_path)
    output = run_forked(folder, "side_by_side.py", "--ranks=3", "--elements", "30000", ranks=3)
    rows = {
        name: (int(count), int(sent))
        for name, count, sent in re.findall(r"^(\w+) +(\d+) +(\d+) ", output, re.M)
    }
    assert rows.keys() == {
        "ring",
        "halving_doubling",
        "tree",
        "central_server",
        "sharded_server",
        "all_gather",
    }
    assert rows["ring"] == (4, 160_000) and rows["central_server"] == (2, 240_000)
    assert rows["all_gather"] == (2, 240_000)
    assert output.count("equal") == 6


def test_d13_the_examples_of_the_api_import_no_torch_distributed() -> None:
    found = [path for path in sorted(EXAMPLES.glob("0[1-8]_*/**/*.py")) if "runs" not in path.parts]
    scripts = {path: path.read_text() for path in found}
    assert len(scripts) == 9
    own = re.compile(r"torch\.distributed|from torch import .*\bdistributed\b")
    assert [path.name for path, text in scripts.items() if own.search(text)] == []


def test_every_example_has_a_page_and_a_line_in_the_table() -> None:
    folders = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
    table = re.findall(
        r"^\| \[(\w+)\]\(\1/README\.md\) \| \S.*\. \|$", (EXAMPLES / "README.md").read_text(), re.M
    )
    assert table == folders and len(folders) == 16
    for folder in folders:
        page = (EXAMPLES / folder / "README.md").read_text()
        assert "```bash\n" in page and "\nNext: [" in page, folder
        assert "```text\n" in page, f"{folder} shows no output"
    assert all(picture.stat().st_size < 150_000 for picture in EXAMPLES.rglob("*.png"))


def test_a_strategy_of_ones_own_keeps_its_state_over_a_resume(tmp_path: Path) -> None:
    losses = []
    for name, starts in (("straight", ["100"]), ("resumed", ["50", "100"])):
        folder = example("14_own_strategy", tmp_path / name)
        outputs = [run_forked(folder, "train.py", "--ranks=2", "--steps", steps, ranks=2) for steps in starts]
        assert all("replicas are equal" in output for output in outputs)
        losses.append(re.findall(r"step (\d+: loss .+)", "".join(outputs)))
    assert losses[0] == losses[1] and len(losses[0]) == 2


def test_a_transport_over_sockets_trains_as_gloo_does(tmp_path: Path) -> None:
    folder = example("13_own_transport", tmp_path)
    settings = [
        "model=gpt_tiny",
        "data.context=16",
        "train.steps=3",
        "train.eval_every=0",
        "train.sample_chars=0",
        "ranks_per_node=2",
        "snapshot=false",
    ]
    losses = []
    for backend in ("sockets.Sockets", "gloo"):
        output = run([sys.executable, "-m", "slurmddp", "train", f"backend={backend}", *settings], folder)
        losses.append(re.findall(r"^Finished: (.+)", output, re.MULTILINE))
    assert losses[0] and losses[0] == losses[1]


def test_a_transport_over_mpi_trains_as_gloo_does(tmp_path: Path) -> None:
    folder = example("13_own_transport", tmp_path)
    mpiexec = str(Path(sys.prefix) / "bin/mpiexec")
    losses = []
    for backend in ("mpi.Mpi", "gloo"):
        output = run([mpiexec, "-n", "3", PYTHON, "over_mpi.py", backend], folder)
        losses.append(re.findall(rf"(step \d+: loss .+ on 3 ranks) over {backend}", output))
    assert len(losses[0]) == 4
    first, other = ([float(line.split()[3]) for line in lines] for lines in losses)
    assert first == pytest.approx(other, rel=1e-3)  # Sums of three ranks have several orders.


def test_a_controller_trains_with_its_workers_and_walks_as_its_page_shows(tmp_path: Path) -> None:
    folder = example("15_controller", tmp_path)
    shown = re.findall(r"^```text\n(.*?)^```", (folder / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert run([sys.executable, "walkthrough.py"], folder) == shown[1]
    output = run([sys.executable, "-m", "slurmddp", "controller", "-n", "2", "parameter_server.py"], folder)
    losses = [float(one) for one in re.findall(r"step \d+: loss ([\d.]+)", output)]
    assert len(losses) == 3 and losses[0] > losses[-1] < 0.5
    assert float(re.findall(r"accuracy ([\d.]+) with 2 workers", output)[0]) > 0.9
