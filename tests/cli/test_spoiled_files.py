"""A file of a run folder that is cut, or whose place something else has taken, is an error in words.

No command waits for a FIFO, and one bad folder does not hide the other runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import slurmddp
from slurmddp.cli.main import main
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, SlurmddpError
from slurmddp.pages import drawing
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import FUNCTION_CALL
from support.runs.cli_runs import end, start, submit

pytestmark = [pytest.mark.usefixtures("elsewhere"), pytest.mark.timeout(60)]

FILES = {
    "overrides.txt": "name=gpt\n",
    "metrics.jsonl": '{"step": 400, "attempt": 0, "time": 1.0, "loss": 1.5}\n',
    "code.txt": "commit 1a2b3c\n",
    "code.json": '{"train.py": "00"}\n',
    "result.json": "[1, 2]\n",
    "checkpoints/latest": "step-0000000400\n",
    "checkpoints/step-0000000400/manifest.json": '{"step": 400}\n',
    "logs/attempt-0/rank-0.log": "hello\n",
    "logs/attempt-0/failure.json": '{"rank": 0, "host": "c07", "exit_code": 1, "signal": null}\n',
    "logs/attempt-0/exit-rank-0": '{"rank": 0, "host": "c07", "exit_code": 1, "signal": null}\n',
    "logs/attempt-0/failure-g0.json": '{"rank": 0, "host": "c07", "exit_code": 1, "signal": null}\n',
    "logs/attempt-0/batch.log": "srun: error\n",
}
COMMANDS = [
    ["status", "gpt"], ["status", "gpt", "--json"], ["list"], ["logs", "gpt"], ["explain", "gpt"],
    ["report", "gpt"], ["diff", "gpt", "other"], ["checkpoints", "gpt"], ["checkpoints", "gpt", "--verify"],
    ["export", "gpt", "--output", "weights.safetensors"], ["resume", "gpt", "--check"],
    ["rerun", "gpt", "--dry-run"], ["stop", "gpt"], ["cancel", "gpt"], ["rm", "gpt", "--yes"],
]  # fmt: skip


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a function that puts something else into the place of a file."""

    def spoil(path: Path) -> None:
        path.unlink()
        make(path)

    return spoil


SPOILS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "link": replace_by(lambda path: path.symlink_to("/gone/file")),
    "link to itself": replace_by(lambda path: path.symlink_to(path.name)),
    "FIFO": replace_by(os.mkfifo),
    "folder": replace_by(Path.mkdir),
}


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return a function that lets this account no longer open a file; root may open each."""

    def close(path: Path) -> None:
        really = os.open

        def refuse(name: Any, *arguments: Any, **options: Any) -> int:
            if str(name) == str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return really(name, *arguments, **options)

        monkeypatch.setattr(os, "open", refuse)

    return close


@pytest.fixture
def runs(make_run: Any, slurm: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[RunFolder, RunFolder]:
    """Two runs: one that failed, with all files, and one that finished."""
    monkeypatch.setattr(drawing, "write_png", lambda *picture: None)
    monkeypatch.setattr(drawing, "figure_svg", lambda name, draw: "")
    folder, other = make_run(), make_run("other-00000002")
    for run, outcome in ((folder, "failed"), (other, "finished")):
        submit(run)
        start(run)
        end(run, outcome)
    for name, text in FILES.items():
        path = folder.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder, other


@pytest.mark.parametrize("spoil", [*SPOILS, "closed"])
@pytest.mark.parametrize("name", [*FILES, "attempts.jsonl", "config.yaml", ".lock"])
def test_each_command_reads_each_spoiled_file(
    runs: tuple[RunFolder, RunFolder],
    closed: Callable[[Path], None],
    capfd: pytest.CaptureFixture[str],
    name: str,
    spoil: str,
) -> None:
    folder, other = runs
    path = folder.path / name
    path.touch()
    SPOILS.get(spoil, closed)(path)
    for command in COMMANDS:
        main(command)
        shown, errors = capfd.readouterr()
        assert "This is a bug" not in errors, command
        assert command != ["list"] or f"{other.name}  finished" in shown


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("link", "it is a link to /gone/file"),
        ("FIFO", "it is a FIFO and no file"),
        ("folder", "it is a folder and no file"),
    ],
)
def test_a_record_that_is_no_file_is_named_with_what_has_its_place(
    runs: tuple[RunFolder, RunFolder], capfd: pytest.CaptureFixture[str], spoil: str, reason: str
) -> None:
    folder, _ = runs
    SPOILS[spoil](folder.attempts_file)
    assert main(["list"]) == EXIT_FINISHED
    assert f"{folder.attempts_file} can't be read: {reason}." in capfd.readouterr().err
    assert main(["cancel", "gpt"]) == EXIT_FAILED
    assert f"{folder.attempts_file} can't be read: {reason}. slurmddp did not" in capfd.readouterr().err
    assert not folder.is_cancelled


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("result.json", "empty", r"\(0 bytes\) contains no value that this Python can read: JSONDecodeError"),
        ("result.json", "cut", r"contains no value.*JSONDecodeError"),
        ("result.json", "link", "can't be read: it is a link to /gone/file"),
        ("result.json", "FIFO", "can't be read: it is a FIFO and no file"),
        ("result.json", "folder", "can't be read: it is a folder and no file"),
        ("result.pkl", "cut", "contains no value.*EOFError|contains no value.*UnpicklingError"),
        ("result.pkl", "empty", "contains no value.*EOFError"),
    ],
)
def test_a_spoiled_result_is_named_with_what_to_do(
    runs: tuple[RunFolder, RunFolder], name: str, spoil: str, reason: str
) -> None:
    _, folder = runs
    folder.config_file.write_text(f"name: f\nprogram: {{script: {FUNCTION_CALL}}}\n")
    path = folder.path / name
    path.write_bytes(json.dumps([1, 2]).encode() if name == "result.json" else b"\x80\x04]\x94(K\x01K\x02e.")
    SPOILS[spoil](path)
    with pytest.raises(SlurmddpError, match=f"{name}.*{reason}"):
        slurmddp.Run(folder.path).result()


def test_values_that_a_run_has_logged_may_be_lost_without_the_state(
    runs: tuple[RunFolder, RunFolder], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, _ = runs
    append_line(folder.metrics_file, {"step": 400, "attempt": 0, "time": 1.0, "loss": 1.5})
    SPOILS["folder"](folder.metrics_file)
    assert main(["status", "gpt"]) == EXIT_FINISHED
    shown, _ = capfd.readouterr()
    assert "failed" in shown and "1.5" not in shown
