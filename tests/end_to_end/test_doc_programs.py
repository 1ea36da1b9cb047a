"""The Python blocks of the documents run as they stand, and the README's program loses nothing at a stop."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import slurmddp
from slurmddp import Distributon
from slurmddp.environments.scrub import scrub
from support.distributed.doc_programs import (
    DOCS,
    ROOT,
    WITH,
    WITHOUT,
    blocks,
    is_program,
    loop_with_a_stop,
    newest_weights,
    python_blocks,
    readme_program,
)
from support.distributed.ranks import Program, place_environments, run_programs

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("forked_programs")]

ENVIRONMENT = {**scrub(os.environ), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
LANGUAGES = ("python", "bash", "yaml", "json", "text", "")
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
        data = torch.utils.data.TensorDataset(torch.randn(64, 1), torch.randn(64, 1))
        inputs, targets = data[:8]
        yield {
            "slurmddp": slurmddp,
            "d": d,
            "distributon": d,
            "model": model,
            "optimizer": optimizer,
            "step": 1,
            "IterableDataset": torch.utils.data.IterableDataset,
            "encode": str.encode,
            "validation": [1],
            "DataLoader": torch.utils.data.DataLoader,
            "data": data,
            "mse_loss": torch.nn.functional.mse_loss,
            "torch": torch,
            "nn": torch.nn,
            "Distributon": Distributon,
            "inputs": inputs,
            "targets": targets,
            "loss": torch.nn.functional.mse_loss(model(inputs), targets),
            "held_out": [(inputs, targets)],
            "loader": d.setup_dataloader(torch.utils.data.DataLoader(data, batch_size=8), accumulate=2),
            "train": torch.utils.data.DataLoader(data, batch_size=8),
            "test": torch.utils.data.DataLoader(data, batch_size=8),
            "generator": torch.nn.Linear(1, 1),
            "critic": torch.nn.Linear(1, 1),
            "prepare": lambda folder: data,
        }


@pytest.mark.parametrize(
    ("doc", "number"), BLOCKS, ids=lambda one: one.name if isinstance(one, Path) else one
)
def test_t15_every_python_block_of_the_documents_runs(
    doc: Path, number: int, request: Any, tmp_path: Path
) -> None:
    block = python_blocks(doc)[number]
    if (doc, number) == (ROOT / "README.md", 0):  # It is a whole program.
        script = tmp_path / "program.py"
        script.write_text(block)
        done = subprocess.run(
            [sys.executable, script],
            cwd=tmp_path,
            env=ENVIRONMENT,
            check=True,
            timeout=300,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert re.fullmatch(r"(step [1-6]00: loss 0\.\d{4}\n){6}", done.stdout)
        assert (tmp_path / "checkpoints" / "latest").is_file()
    else:
        names = request.getfixturevalue("names")
        exec(compile(block.replace('"/shared/', f'"{tmp_path}/'), doc.name, "exec"), names)


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))
def test_no_block_of_a_document_is_python_that_does_not_run(doc: Path) -> None:
    for language, body in blocks(doc):
        assert language in LANGUAGES, f"a block of {doc.name} is in {language!r}:\n{body}"
        assert language in ("python", "bash") or not is_program(body), f"{doc.name} does not run:\n{body}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\na = 1\n```\n", ["a = 1\n"]),
        ("- item\n\n  ```python title\n  a = 1\n  ```\n", ["a = 1\n"]),
        ("~~~python\na = 1\n~~~\n```text\nb\n```\n```python\nc\n```\n", ["a = 1\n", "c\n"]),
        ("```bash\n# python\n```\n", []),
    ],
)
def test_the_python_blocks_of_a_page_are_found(tmp_path: Path, text: str, expected: list[str]) -> None:
    (tmp_path / "page.md").write_text(text)
    assert python_blocks(tmp_path / "page.md") == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a = 1", True),
        ("with d:\n    f()", True),
        ("f(1)", True),
        ("f(a: int) -> None", False),
        ("word", False),
    ],
)
def test_python_is_seen_whatever_the_fence_says(body: str, expected: bool) -> None:
    assert is_program(body) is expected


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
    assert found["goodput"]["share"] > 0 and "unknown" not in found["goodput"]["parts"]
    assert newest_weights(one) == newest_weights(other)
    assert not (tmp_path / "checkpoints").exists()


def leave(folder: Path, *, signal_after: int) -> int:
    """Run a loop that breaks at a stop, in slurmddp's job of one rank; return the exit code."""
    (folder / "breaks.py").write_text(loop_with_a_stop(WITHOUT, "break", signal_after=signal_after))
    command = ["-m", "slurmddp", "train", "program.script=breaks.py", "ranks_per_node=1", "name=breaks"]
    return subprocess.run([sys.executable, *command], cwd=folder, env=ENVIRONMENT, timeout=300).returncode


def test_the_attempt_after_a_stop_at_the_last_step_finishes(tmp_path: Path) -> None:
    assert leave(tmp_path, signal_after=5) == 75
    assert leave(tmp_path, signal_after=0) == 0


def test_plain_python_exits_with_75_after_a_stop(tmp_path: Path) -> None:
    program = tmp_path / "plain.py"
    program.write_text(loop_with_a_stop(WITHOUT, "d.stop()", devices=2))
    command = [sys.executable, "plain.py"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    check_stopped([(done.returncode, done.stderr)])


@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize(("begin", "then"), [(WITH, "d.stop()"), (WITH, "break"), (WITHOUT, "d.stop()")])
@pytest.mark.parametrize("devices", [1, 2])
def test_each_rank_exits_with_75_after_a_stop(tmp_path: Path, begin: str, then: str, devices: int) -> None:
    program = tmp_path / "plain.py"
    program.write_text(loop_with_a_stop(begin, then, devices=devices))
    environments = place_environments(2) if devices == 2 else [{}]
    ended = run_programs(
        [Program([str(program)], {**ENVIRONMENT, **environ}, tmp_path) for environ in environments]
    )
    check_stopped(ended)


def check_stopped(ended: list[tuple[int, str]]) -> None:
    """Check the exit codes of all processes, and that one of them prints the stop."""
    output = "".join(text for _, text in ended)
    assert {code for code, _ in ended} == {75}, output
    assert "Traceback" not in output
    assert output.count("The training was stopped by SIGTERM") == 1
