"""Find the files of a project's code that have changed since a submission, by their digests.

A submission records the digest of each file, also outside of a git repository and without a snapshot. So the
next command can say that a run has computed with other code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from slurmddp.host.regular_file import read_regular
from slurmddp.runs.folder import code_snapshot
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import Job, own_script
from slurmddp.short_text import first_items

_SHOWN = 3


def digests(job: Job) -> dict[str, str]:
    """Return the SHA-256 of each file of the code of a job, by its path relative to the project."""
    runs = job.run_dir.parent
    exclude = [] if job.project_dir.is_relative_to(runs) else [runs]
    paths = code_snapshot.sources(job.project_dir, exclude)

    named: dict[str, str] = {}
    for path in [*paths, *_script(job)]:
        with suppress(OSError):  # A broken link, or a file that was removed meanwhile.
            named[_name(path, job.project_dir)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return named


def write(file: Path, job: Job) -> None:
    """Record the digests of a submission in `file`."""
    file.write_text(json.dumps(digests(job), indent=0) + "\n", encoding="utf-8")


def differences(old: Path, new: Path) -> list[str]:
    """Return the names of the files that differ between two records; empty if there is no old record."""
    before, after = _read(old), _read(new)
    return [] if before is None or after is None else _changed(before, after)


def changed_since(folder: RunFolder, job: Job) -> str:
    """Return a sentence that names the files that have changed since a run was submitted; empty without any.

    Args:
        folder: the run folder.
        job: the job of the same command now.
    """
    before = _read(folder.code_digests_file)
    names = [] if before is None else _changed(before, digests(job))
    have = "has" if len(names) == 1 else "have"
    return f"{shown(names)} {have} changed since this run." if names else ""


def shown(names: Sequence[str]) -> str:
    """Return the names of changed files for a sentence."""
    return first_items(names, _SHOWN)


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def _script(job: Job) -> list[Path]:
    """Return the script of a job, which may be no Python file or lie outside of the project."""
    script = own_script(job.program.config.get("program") or {})
    path = job.project_dir / Path(script).expanduser()
    return [path] if script and path.is_file() else []


def _name(path: Path, project_dir: Path) -> str:
    return str(path.relative_to(project_dir)) if path.is_relative_to(project_dir) else str(path)


def _read(file: Path) -> dict[str, str] | None:
    """Return a record; None without one, as in the folder of a run of an earlier version."""
    try:
        record = json.loads(read_regular(file))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
