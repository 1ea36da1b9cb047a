"""Files of another host are seen at once. A look-up hides no file from other programs of this host."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurmddp.batch.attempt import Attempt, read_settings
from slurmddp.batch.node_exclusion import lost_nodes
from slurmddp.batch.progress import latest_name
from slurmddp.checkpoint.files import visibility
from slurmddp.checkpoint.files.manifest import newest_step
from slurmddp.host.atomic_file import write_atomic
from slurmddp.launchers.coordinator.run_folder_recorder import RunFolderRecorder as Recorder
from slurmddp.runs.folder.excluded_nodes import exclude, excluded_nodes
from slurmddp.runs.folder.late_files import create_new, is_there, look_again, read_text
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.metrics import latest
from slurmddp.training.stopping.agreement import file_reason
from support.runs.remembered_names import RememberedNames, remembered
from support.runs.taken_names import refusing_open
from support.slurm.slurm_jobs import batch_settings

__all__ = ["remembered"]

FAILURE = '{"rank": 1, "host": "c07", "exit_code": 1, "signal": null}'
STEP = {"step": 3, "attempt": 0, "loss": 0.5, "time": 1.0}


@dataclass(frozen=True)
class Question:
    """A look-up of a file of another host, and its results before and after the file is written."""

    path: Callable[[RunFolder], Path]
    text: str
    ask: Callable[[RunFolder], Any]
    before: Any
    after: Any


def attempt(folder: RunFolder) -> Attempt:
    return Attempt(folder, 0, batch_settings(nodes=2), "41", print)


QUESTIONS = {
    "a stop": Question(lambda run: run.stop_file, "", lambda run: run.is_stopped, False, True),
    "a stop, in a rank": Question(
        lambda run: run.stop_file, "", lambda run: file_reason(run.stop_file) is not None, False, True
    ),
    "a stop, in an agent": Question(
        lambda run: run.stop_file, "", lambda run: Recorder(run, 0).is_stopped(), False, True
    ),
    "a stop, for the coordinator": Question(
        lambda run: run.stop_file, "", lambda run: run.is_over(0), False, True
    ),
    "a cancel": Question(lambda run: run.cancelled_file, "", lambda run: run.is_cancelled, False, True),
    "an exit code": Question(
        lambda run: run.exit_file(0, 1), "75\n", lambda run: attempt(run).exit_code_of(1), None, 75
    ),
    "agents without exit code": Question(
        lambda run: run.exit_file(0, 1), "0\n", lambda run: attempt(run).silent_nodes(), [0, 1], [0]
    ),
    "lost agents": Question(
        lambda run: run.node_log(0, 1), "", lambda run: attempt(run).lost_agents(["a", "b"]), {}, {1: "b"}
    ),
    "the end of node 0": Question(
        lambda run: run.exit_file(0, 0), "0\n", lambda run: Recorder(run, 0).has_ended(), False, True
    ),
    "a failure": Question(
        lambda run: run.failure_file(0), FAILURE, lambda run: attempt(run).recorded_failure(), None, 1
    ),
    "a failure, in an agent": Question(
        lambda run: run.failure_file(0), FAILURE, lambda run: Recorder(run, 0).has_ended(), False, True
    ),
    "an unable agent": Question(
        lambda run: run.unable_file(0, 1), "{}", lambda run: Recorder(run, 0).is_confirmed(1), True, False
    ),
    "words of srun": Question(
        lambda run: run.batch_log(0),
        "srun: error: Node failure on c07\n",
        lambda run: lost_nodes(run.batch_log(0)),
        set(),
        {"c07"},
    ),
    "excluded nodes": Question(
        lambda run: run.excluded_file,
        '{"node": "c07", "expires": 9e9}\n',
        lambda run: excluded_nodes(run),
        [],
        ["c07"],
    ),
    "steps": Question(
        lambda run: run.metrics_file, f"{json.dumps(STEP)}\n", lambda run: latest(run).step, None, 3
    ),
}  # fmt: skip


def test_the_newest_checkpoint_of_another_host_is_seen_at_once(
    tmp_path: Path, remembered: RememberedNames
) -> None:
    folder = RunFolder(tmp_path)
    assert latest_name(folder) == ""
    with remembered.other_host():
        folder.checkpoints_dir.mkdir()
    assert latest_name(folder) == ""
    with remembered.other_host():
        (folder.checkpoints_dir / "latest").write_text("step-7\n")
    assert latest_name(folder) == "step-7"


def test_the_first_checkpoint_of_another_host_is_the_one_to_resume_from(
    tmp_path: Path, remembered: RememberedNames
) -> None:
    """A host that has seen a run without checkpoints does not start it from step 0 again."""
    root = RunFolder(tmp_path).checkpoints_dir
    assert newest_step(root) is None
    with remembered.other_host():
        (root / "step-0000000005").mkdir(parents=True)
    assert newest_step(root) == 5


def test_a_checkpoint_that_a_rank_waits_for_is_seen_when_another_host_has_written_it(
    tmp_path: Path, remembered: RememberedNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-0000000005"

    def write(_seconds: float) -> None:
        with remembered.other_host():
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / "manifest.json").write_text("{}")

    monkeypatch.setattr(visibility.time, "sleep", write)
    visibility.wait_until_visible(checkpoint, hashlib.sha256(b"{}").hexdigest())


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("job.json", lambda run: read_settings(run).nodes),
        ("stop", lambda run: int(read_text(run.stop_file) or 0)),
        ("config.yaml", lambda run: run.config()["nodes"]),
    ],
)
def test_a_file_that_another_host_has_replaced_is_read_anew(
    tmp_path: Path, remembered: RememberedNames, name: str, read: Callable[[RunFolder], int]
) -> None:
    """Some hosts keep the handle of the old file for as long as they remember its name."""
    folder = RunFolder(tmp_path)
    for nodes in (2, 4):
        job_json = json.dumps(batch_settings(nodes=nodes)._asdict())
        texts = {"job.json": job_json, "stop": f"{nodes}", "config.yaml": f"nodes: {nodes}"}
        with remembered.other_host():
            write_atomic(tmp_path / name, texts[name])
        assert read(folder) == nodes


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_a_file_of_another_host_is_seen_at_once_however_often_it_was_asked_for(
    tmp_path: Path, remembered: RememberedNames, question: Question
) -> None:
    folder = RunFolder(tmp_path)
    folder.claim_attempt()
    (folder.log_dir(0) / "rank-0.log").touch()
    assert question.ask(folder) == question.before
    with remembered.other_host():
        question.path(folder).write_text(question.text)
    assert question.ask(folder) == question.after


def test_the_last_act_of_an_agent_does_not_hide_the_folder_of_the_next_attempt(
    tmp_path: Path, remembered: RememberedNames
) -> None:
    """SLURM opens a log there by name when the next attempt starts on this host."""
    folder = RunFolder(tmp_path)
    assert not folder.is_superseded(folder.claim_attempt())
    with remembered.other_host():
        assert folder.claim_attempt() == 1
    assert remembered.finds(folder.log_dir(1))
    assert folder.is_superseded(0)


def test_a_name_that_was_looked_up_stays_absent(tmp_path: Path, remembered: RememberedNames) -> None:
    """The file system of these tests has the cache that the tests are about."""
    path = tmp_path / "late"
    assert not path.exists()
    with remembered.other_host():
        path.touch()
    assert not path.exists()
    assert is_there(path)


def test_a_folder_that_is_missing_or_closed_holds_nothing(tmp_path: Path) -> None:
    assert not is_there(tmp_path / "gone" / "file")
    assert read_text(tmp_path / "gone" / "file") is None
    look_again(tmp_path / "gone")


def test_a_node_is_noted_where_another_host_has_noted_one(
    tmp_path: Path, remembered: RememberedNames
) -> None:
    folder = RunFolder(tmp_path)
    assert excluded_nodes(folder) == []
    with remembered.other_host():
        exclude(folder, "c07", "it does not answer", hours=1)
    exclude(folder, "c08", "it does not answer", hours=1)
    assert excluded_nodes(folder) == ["c07", "c08"]


def test_a_name_is_created_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.close(create_new(tmp_path / "file", 0o600))
    for opened in (os.open, refusing_open):
        monkeypatch.setattr(os, "open", opened)
        with pytest.raises(FileExistsError):
            create_new(tmp_path / "file", 0o600)


def test_a_refusal_of_a_name_that_does_not_exist_stays_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError):
        create_new(tmp_path / "file", 0o600)
