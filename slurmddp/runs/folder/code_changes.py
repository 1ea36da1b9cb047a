"""Find the files of a project's code that have changed since a submission, by their digests.

Each submission records the digest of every file, even outside a git repository and without a snapshot. The
next command can then report that a run has computed with other code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from slurmddp.host.regular_file import read_regular
from slurmddp.runs.folder import project_files
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import Job, own_script
from slurmddp.short_text import first_items

_SHOWN = 3
"""The largest number of changed files that a sentence names."""


def digests(job: Job) -> dict[str, str]:
    """Return the SHA-256 of each file of a job's code; the keys are paths relative to the project."""
    runs_dir = job.run_dir.parent
    exclude = [runs_dir]
    # If the folder of all runs holds the project itself, excluding that folder would exclude all code.
    if job.project_dir.is_relative_to(runs_dir):
        exclude = []
    paths = project_files.sources(job.project_dir, exclude)

    named: dict[str, str] = {}
    for path in [*paths, *_script(job)]:
        # A file that can't be read is left out: a link may be broken, or the file was removed after the
        # listing.
        with suppress(OSError):
            named[_name(path, job.project_dir)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return named


def write(file: Path, job: Job) -> None:
    """Write the SHA-256 of each file of a job's code to `file`, as JSON."""
    file.write_text(json.dumps(digests(job), indent=0) + "\n", encoding="utf-8")


def differences(old: Path, new: Path) -> list[str]:
    """Return the names of the files whose digests differ between two records; empty if a record is missing.

    Args:
        old: a file that `write` has written.
        new: another such file.
    """
    before = _read(old)
    after = _read(new)
    if before is None or after is None:
        return []
    return _changed(before, after)


def changed_since(folder: RunFolder, job: Job) -> str:
    """Return a sentence that names the files that have changed since a run was submitted.

    The sentence is empty if no file has changed, or if the run folder has no digests.

    Args:
        folder: the run folder.
        job: the job that the same command would submit now.
    """
    before = _read(folder.code_digests_file)
    if before is None:
        return ""

    names = _changed(before, digests(job))
    if not names:
        return ""
    verb = "has" if len(names) == 1 else "have"
    return f"{shown(names)} {verb} changed since this run."


def shown(names: Sequence[str]) -> str:
    """Return a phrase with the first `_SHOWN` names, and the number of further names."""
    return first_items(names, _SHOWN)


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def _script(job: Job) -> list[Path]:
    """Return a list with the script of a job, empty without a script.

    `project_files.sources` may lack the script: it may not be a Python file, or may be outside the project.
    """
    script = own_script(job.program.config.get("program") or {})
    path = job.project_dir / Path(script).expanduser()
    return [path] if script and path.is_file() else []


def _name(path: Path, project_dir: Path) -> str:
    if path.is_relative_to(project_dir):
        return str(path.relative_to(project_dir))
    return str(path)


def _read(file: Path) -> dict[str, str] | None:
    """Return a record of digests; None if it is missing, as in the run folders of earlier versions."""
    try:
        record = json.loads(read_regular(file))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
