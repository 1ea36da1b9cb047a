"""Create the run folder: everything that the login side hands to the nodes.

A new folder is built beside its place and then renamed, so that an error leaves no half of a run. If a person
types the same command again, the existing folder keeps its logs, metrics and checkpoints, and gets the new
settings.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from slurmddp.errors import ConfigError
from slurmddp.host.atomic_file import replacing
from slurmddp.host.free_name import first_free
from slurmddp.runs.folder import code_changes, code_snapshot
from slurmddp.runs.folder.freeze import batch_program
from slurmddp.runs.folder.late_files import read_bytes
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import refuse_foreign, warn_if_exposed
from slurmddp.settings.spec import Job
from slurmddp.slurm.script import settings

Say = Callable[[str], object]
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml where PyYAML has it: it is several times faster, and a sweep writes thousands of values."""
_last_texts: dict[str, tuple[object, str]] = {}
"""The last value of each top-level key, and its YAML: the points of a sweep share most values as objects."""


def create(job: Job, script: str | None, *, with_code: bool = True) -> bool:
    """Write the run folder of a new run; if the folder exists, return False and change nothing.

    Args:
        job: the job of the run.
        script: its batch script; None for a local run.
        with_code: False for an element of an array, which copies the array's code at its first start.

    Raises:
        ConfigError: as for `prepare`.
    """
    if script is not None and with_code:
        check_syntax(script)

    with _draft(job, script) as draft:
        if with_code:
            write_code(draft, job, exclude=[draft.path, job.run_dir])
        return _put_in_place(draft, job.run_dir)


def prepare(
    job: Job, script: str | None, say: Say = lambda text: None, *, code: RunFolder | None = None
) -> RunFolder:
    """Write the run folder of `job`, with `script` as its batch script, and return it.

    Also remove the marks of an earlier `cancel` or `stop`.

    Args:
        job: the job of the run.
        script: its batch script; None for a local run.
        say: called with a sentence if the code has changed.
        code: the folder with the code of the array to which the run belongs (see `write_code_of_array`).

    Raises:
        ConfigError: the script can't be parsed, the folder can't be written, or it belongs to another
            account.
    """
    folder = RunFolder(job.run_dir)
    if script is not None and code is None:
        check_syntax(script)

    with _draft(job, script) as draft:
        if code is None:
            write_code(draft, job, exclude=[draft.path, folder.path])
        else:
            _copy_code(code, draft)

        if not _put_in_place(draft, folder.path):
            # Another account may have created the folder since `_draft` looked.
            refuse_foreign(folder.path)
            _update(draft, folder, say)
    return folder


def write_code_of_array(place: Path, job: Job, runs: Sequence[Path]) -> RunFolder:
    """Write the code that the runs of an array share into the new folder `place`.

    Args:
        place: a folder in the folder of the array.
        job: the job of any of the runs.
        runs: the folders of the runs; the snapshot of the code leaves them out.
    """
    folder = RunFolder(place)

    with _writable(place), _writable_for_us_alone():
        place.mkdir()
        write_code(folder, job, exclude=[place.parent, *runs])
    warn_if_exposed(place)
    return folder


@contextmanager
def _draft(job: Job, script: str | None) -> Iterator[RunFolder]:
    """Yield a new folder beside the place of a run, with its configuration and batch script."""
    place = job.run_dir
    refuse_foreign(place)

    with _writable(place), _writable_for_us_alone():
        place.parent.mkdir(parents=True, exist_ok=True)
        with _beside(place) as draft:
            _write_settings(draft, job, script)
            yield draft
    warn_if_exposed(place)


def check_syntax(script: str) -> None:
    """Raise ConfigError if bash can't parse `script`, because of the `setup` lines of a cluster file."""
    bash = shutil.which("bash")
    if bash is None:
        return

    result = subprocess.run([bash, "-n"], input=script, capture_output=True, text=True, errors="replace")
    if result.returncode:
        reason = (result.stderr.strip() or "no reason given").splitlines()[0]
        raise ConfigError(
            f"bash can't read the batch script: {reason}.",
            hint="Look for an open quote or block in the `setup` lines of the cluster file.",
        )


def _write_settings(draft: RunFolder, job: Job, script: str | None) -> None:
    """Write the configuration of a run, resolved and as typed, and its batch script with its settings."""
    draft.logs_dir.mkdir()
    draft.config_file.write_text(_as_yaml(job.program.config), encoding="utf-8")
    typed = "".join(f"{shlex.quote(override)}\n" for override in job.overrides)
    draft.overrides_file.write_text(typed, encoding="utf-8")

    if script is not None:
        draft.script_file.write_text(script, encoding="utf-8")
        draft.job_file.write_text(json.dumps(settings(job), indent=2) + "\n", encoding="utf-8")


def _as_yaml(config: Mapping[str, Any]) -> str:
    """Return a configuration as YAML; a top-level value that is still the same object is not dumped again."""
    for key, value in config.items():
        if key not in _last_texts or _last_texts[key][0] is not value:
            _last_texts[key] = (value, _text_of({key: value}))
    return "".join(_last_texts[key][1] for key in config)


def _text_of(value: Mapping[str, Any]) -> str:
    text = yaml.dump(value, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
    # PyYAML reads this line break as a blank unless it is escaped.
    if "\x85" in text:
        return yaml.dump(value, Dumper=_DUMPER, sort_keys=False)
    return text


def write_code(folder: RunFolder, job: Job, exclude: Sequence[Path]) -> None:
    """Write the program of the batch step, a snapshot of the project's code, and the digests of its files.

    The snapshot leaves out the folder of all runs. If that folder holds the project, the snapshot leaves out
    the folders `exclude` instead.
    """
    if job.launcher == "slurm":
        folder.batch_file.write_bytes(batch_program())
    code_changes.write(folder.code_digests_file, job)
    if not job.snapshot:
        return

    runs_dir = job.run_dir.parent
    left_out = exclude if job.project_dir.is_relative_to(runs_dir) else [runs_dir]
    note = code_snapshot.take(job.project_dir, folder.code_dir, exclude=left_out)
    folder.code_note_file.write_text(f"{note}\n", encoding="utf-8")


def _copy_code(source: RunFolder, draft: RunFolder) -> None:
    """Copy what `write_code` has written."""
    # With hard links, a run that writes into a file of its code would change the code of other runs.
    for path in source.path.iterdir():
        if path.is_dir():
            shutil.copytree(path, draft.path / path.name, symlinks=True)
        else:
            shutil.copy2(path, draft.path / path.name)


def _put_in_place(draft: RunFolder, place: Path) -> bool:
    """Rename the draft to its place; return False if the place is taken."""
    try:
        draft.path.rename(place)
    except OSError:
        if place.is_dir():
            return False
        raise
    return True


def _update(draft: RunFolder, folder: RunFolder, say: Say) -> None:
    """Replace each file of an existing run by the file of the new submission."""
    folder.logs_dir.mkdir(exist_ok=True)
    changed = code_changes.differences(folder.code_digests_file, draft.code_digests_file)
    if changed:
        say(f"The code has changed since the last submission: {code_changes.shown(changed)}.")

    for new in (
        draft.config_file, draft.overrides_file, draft.job_file, draft.batch_file, draft.script_file,
        draft.code_note_file, draft.code_digests_file,
    ):  # fmt: skip
        if new.exists():
            _replace(folder.path / new.name, new.read_bytes())
    if not draft.code_note_file.exists():
        folder.code_note_file.unlink(missing_ok=True)
    _replace_code(draft.code_dir, folder.code_dir, draft.path / "replaced")

    # Last, so that a submission that fails leaves a cancelled run cancelled.
    folder.cancelled_file.unlink(missing_ok=True)
    folder.stop_file.unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """Replace a file if its content differs."""
    # A node whose file system remembers a replaced file may fail to read it ("Stale file handle").
    if read_bytes(path) != content:
        with replacing(path) as stream:
            stream.write(content)


def _replace_code(new: Path, place: Path, replaced: Path) -> None:
    """Replace the old snapshot by the new snapshot, or remove it; keep the files that a job wrote into it.

    Args:
        new: the new snapshot; missing if the run has none.
        place: the place of the snapshot in the run folder.
        replaced: where the old snapshot is moved; the caller removes it.
    """
    if not new.is_dir():
        if code_snapshot.written_by_jobs(place):
            place.rename(free_name(place))
        elif place.is_dir():
            place.rename(replaced)
        return

    if place.is_dir():
        code_snapshot.carry_over(place, new)
        place.rename(replaced)
    new.rename(place)


def free_name(path: Path) -> Path:
    """Return the first `NAME.old-N` that is free beside `path`."""
    name = first_free(f"{path.name}.old-", lambda name: path.with_name(name).exists())
    return path.with_name(name)


@contextmanager
def _beside(place: Path) -> Iterator[RunFolder]:
    """Yield a new folder next to `place`, private to this account; remove what is left of it afterwards."""
    # Only in the same folder, and so on the same file system, a rename puts all files in place at once.
    draft = place.with_name(f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}")
    draft.mkdir(mode=0o700)
    try:
        yield RunFolder(draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _writable_for_us_alone() -> Iterator[None]:
    """Create the files of the body so that no other account can write to them, whatever the umask is."""
    # The umask can only be read by setting it.
    before = os.umask(0o022)
    os.umask(before | 0o022)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Raise an OSError of the body as a ConfigError that names the path and what to do."""
    # The place of an existing run can't change, so another runs_dir would not help.
    if folder.is_dir():
        hint = "Make it writable for this account, or make room there."
    else:
        hint = "With runs_dir=, choose a folder on a file system that all nodes share and you may write to."

    try:
        yield
    except OSError as error:
        has_path = isinstance(error.filename, str)
        failed = Path(error.filename) if has_path else folder
        if not failed.is_relative_to(folder.parent) and not os.access(failed, os.R_OK) and failed.exists():
            raise ConfigError(
                f"{failed} is in the project and can't be read: {error.strerror or error}.",
                hint="Make it readable for this account, remove it, or name it in .gitignore, so that the "
                "snapshot of the code leaves it out.",
            ) from error

        # The error names a new file; the folder of that file is what a person can change.
        where = failed.parent
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            where = failed
        raise ConfigError(
            f"The run folder can't be written in {where}: {error.strerror or error}.", hint=hint
        ) from error
