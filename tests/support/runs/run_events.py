"""Events as runs write them to `attempts.jsonl`."""

from __future__ import annotations

from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder


def make_folder(tmp_path, config):
    run = RunFolder(tmp_path / "gpt-0a1b2c3d")
    run.path.mkdir()
    run.config_file.write_text(config)
    return run


def add(folder, kind, time, **facts):
    write(folder, event(kind, time, **facts))


def write(folder, *events):
    for record in events:
        append_line(folder.attempts_file, record)


def event(kind, time, attempt=None, **facts):
    number = {} if attempt is None else {"attempt": attempt}
    return {"event": kind, "time": time, **number, **facts}


def submitted(time, job_id="7", **facts):
    return event("submitted", time, job_id=job_id, **facts)


def started(time, attempt=0, job_id="7", launcher="slurm", **facts):
    return event("started", time, attempt, job_id=job_id, launcher=launcher, **facts)


def ended(time, outcome, attempt=0, next_="none", job_id="7"):
    return event("ended", time, attempt, job_id=job_id, outcome=outcome, next=next_)


def saved(time, step, attempt=0, seconds=2.0):
    return event("saved", time, attempt, step=step, seconds=seconds)


FAILED = [
    submitted(100),
    started(110),
    event("first_step", 120, 0, step=1),
    saved(142, 20),
    event("rank_failed", 160, 0, rank=1),
    ended(161, "failed", next_="requeue"),
]
