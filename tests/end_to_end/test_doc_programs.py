"""The Python blocks of the documents run as they stand, and the README's program loses nothing at a stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp import Distributon
from slurmddp.environments.scrub import scrub
from support.distributed.doc_programs import DOCS, ROOT, newest_weights, python_blocks, readme_program

pytestmark = pytest.mark.distributed

ENVIRONMENT = {**scrub(os.environ), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
BLOCKS = [(doc, number) for doc in DOCS for number in range(len(python_blocks(doc)))]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The objects that a reader of the documents has at that point."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("one\ntwo\n")
    with Distributon(1) as d:
        d.launch()
        model = d.setup_model(torch.nn.Linear(1, 1))
        optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters()))
        yield {
            "d": d,
            "distributon": d,
            "model": model,
            "optimizer": optimizer,
            "step": 1,
            "IterableDataset": torch.utils.data.IterableDataset,
            "encode": str.encode,
            "validation": [1],
            "DataLoader": torch.utils.data.DataLoader,
            "data": torch.utils.data.TensorDataset(torch.randn(64, 1), torch.randn(64, 1)),
            "mse_loss": torch.nn.functional.mse_loss,
        }


@pytest.mark.parametrize(
    ("doc", "number"), BLOCKS, ids=lambda one: one.name if isinstance(one, Path) else one
)
def test_every_python_block_of_the_documents_runs(
    doc: Path, number: int, request: Any, tmp_path: Path
) -> None:
    block = python_blocks(doc)[number]
    if doc == ROOT / "README.md":  # It is a whole program.
        script = tmp_path / "program.py"
        script.write_text(block)
        subprocess.run([sys.executable, script], cwd=tmp_path, env=ENVIRONMENT, check=True, timeout=300)
        assert (tmp_path / "checkpoints" / "latest").is_file()
    else:
        exec(compile(block, doc.name, "exec"), request.getfixturevalue("names"))


def train(folder: Path, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "slurmddp", "train", "program.script=readme.py", f"name={name}"]
    return subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def await_begun(folder: Path, run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not (folder / "begun").exists():
        assert run.poll() is None and time.monotonic() < deadline, run.communicate(timeout=10)[0]
        time.sleep(0.05)


def test_the_readme_program_ends_with_equal_weights_after_a_stop(tmp_path: Path) -> None:
    readme_program(tmp_path)
    whole = train(tmp_path, "whole")
    await_begun(tmp_path, whole)
    said, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0, said
    (tmp_path / "begun").unlink()
    first = train(tmp_path, "parts")
    await_begun(tmp_path, first)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=300)
    assert first.returncode == 75, said
    second = train(tmp_path, "parts")
    said, _ = second.communicate(timeout=300)
    assert second.returncode == 0, said
    (one,), (other,) = ((tmp_path / "runs").glob(f"{name}-*") for name in ("whole", "parts"))
    lines = [json.loads(line) for line in (other / "attempts.jsonl").read_text().splitlines()]
    assert [line["outcome"] for line in lines if line["event"] == "ended"] == ["stopped", "finished"]
    assert [[line["event"] for line in lines if line.get("attempt") == attempt] for attempt in (0, 1)] == [
        ["started", "first_step", "signalled", "saved", "ended"],
        ["started", "resumed", "first_step", "saved", "ended"],
    ]
    saved, resumed, first = (
        [line["step"] for line in lines if line["event"] == event]
        for event in ("saved", "resumed", "first_step")
    )
    assert (resumed, first) == (saved[:1], [1, saved[0] + 1])
    status = [sys.executable, "-m", "slurmddp", "status", "--json", other]
    found = json.loads(subprocess.run(status, env=ENVIRONMENT, capture_output=True, check=True).stdout)
    assert (found["step"], found["saved_step"]) == (saved[1], saved[1])
    assert found["ledger"]["goodput"] > 0 and "untold" not in found["ledger"]["parts"]
    assert newest_weights(one) == newest_weights(other)
    assert not (tmp_path / "checkpoints").exists()


BREAKS = """
import os, signal, sys, torch
from slurmddp import Distributon

{begin}
    d.launch()
    model = d.setup_model(torch.nn.Linear(1, 1))
    for step in range(1, 6):
        d.backward(model(torch.ones(1, 1)).sum())
        if step == {signal_after}:
            os.kill(os.getpid(), signal.SIGTERM)
        if d.should_stop():
            d.save(step, model=model)
            {then}
    {last}
"""
WITH, WITHOUT = "with Distributon() as d:", "d = Distributon()\nif True:"


def leave(folder: Path, begin: str, then: str, last: str = "pass", *, signal_after: int = 3) -> int:
    """Run a loop in slurmddp's own job of one rank; return its exit code."""
    text = BREAKS.format(begin=begin, then=then, last=last, signal_after=signal_after)
    (folder / "breaks.py").write_text(text)
    command = ["-m", "slurmddp", "train", "program.script=breaks.py", "ranks_per_node=1", "name=breaks"]
    return subprocess.run([sys.executable, *command], cwd=folder, env=ENVIRONMENT, timeout=300).returncode


@pytest.mark.parametrize(
    ("begin", "then"), [(WITH, "break"), (WITHOUT, "break"), (WITHOUT, "sys.exit()"), (WITH, "sys.exit(75)")]
)
def test_a_loop_that_is_left_at_a_stop_has_not_finished(tmp_path: Path, begin: str, then: str) -> None:
    assert leave(tmp_path, begin, then) == 75


def test_the_attempt_after_a_stop_at_the_last_step_finishes(tmp_path: Path) -> None:
    assert leave(tmp_path, WITHOUT, "break", signal_after=5) == 75
    assert leave(tmp_path, WITHOUT, "break", signal_after=0) == 0


def test_a_loop_that_computes_on_after_a_stop_finishes(tmp_path: Path) -> None:
    assert leave(tmp_path, WITHOUT, "continue", "d.backward(model(torch.ones(1, 1)).sum())") == 0


def test_an_error_after_a_stop_is_no_stop(tmp_path: Path) -> None:
    assert leave(tmp_path, WITHOUT, "break", "raise ValueError('after the loop')") == 1
    assert leave(tmp_path, WITH, "sys.exit(3)") == 1


def test_plain_python_exits_with_75_after_a_stop(tmp_path: Path) -> None:
    for begin, then in ((WITH, "d.stop()"), (WITH, "break"), (WITHOUT, "d.stop()")):
        (tmp_path / "plain.py").write_text(BREAKS.format(begin=begin, then=then, last="pass", signal_after=3))
        for devices in (1, 2):
            text = (tmp_path / "plain.py").read_text().replace("Distributon()", f"Distributon({devices})")
            (tmp_path / "plain.py").write_text(text)
            done = subprocess.run(
                [sys.executable, "plain.py"],
                cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            assert done.returncode == 75, done.stderr
            assert "Traceback" not in done.stderr
            assert done.stderr.count("The training was stopped by SIGTERM") == 1
