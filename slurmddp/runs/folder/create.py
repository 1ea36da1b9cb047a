"""Create the run folder: everything that the login side hands to the nodes.

A new folder is built under a temporary name and then renamed, so that an error leaves no incomplete run. If a
person types the same command again, the existing folder keeps its logs, metrics and checkpoints, and gets the
new settings.
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
"""PyYAML's dumper, on libyaml if possible: that is several times faster, which sweeps need."""
_last_texts: dict[str, tuple[object, str]] = {}
"""Cache of `_as_yaml`: by top-level key, the last value and its YAML. Runs of a sweep share most values."""


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
    """Write or update the run folder of `job`, with `script` as its batch script, and return it.

    The files `cancelled` and `stop`, which `slurmddp cancel` and `slurmddp stop` create, are removed.

    Args:
        job: the job of the run.
        script: its batch script; None for a local run.
        say: called with a sentence if the code has changed since the last submission.
        code: the result of `write_code_of_array` if the run belongs to an array: its code is copied.

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
            # Another account may have created the folder since `_draft` checked its owner.
            refuse_foreign(folder.path)
            _update(draft, folder, say)
    return folder


def write_code_of_array(place: Path, job: Job, runs: Sequence[Path]) -> RunFolder:
    """Create the folder `place` with the code that the runs of an array share (see `write_code`); return it.

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
    """Yield a temporary folder beside the run folder, with the run's configuration and batch script.

    At the end the temporary folder is removed, unless the body has renamed it.
    """
    place = job.run_dir
    refuse_foreign(place)

    with _writable(place), _writable_for_us_alone():
        place.parent.mkdir(parents=True, exist_ok=True)
        with _beside(place) as draft:
            _write_settings(draft, job, script)
            yield draft
    warn_if_exposed(place)


def check_syntax(script: str) -> None:
    """Raise ConfigError if bash can't parse `script`; do nothing on a machine without bash.

    Only the `setup` lines of a cluster file can cause a syntax error.
    """
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
    """Write the resolved configuration, the overrides as typed, and a batch script with its settings."""
    draft.logs_dir.mkdir()
    draft.config_file.write_text(_as_yaml(job.program.config), encoding="utf-8")
    typed = "".join(f"{shlex.quote(override)}\n" for override in job.overrides)
    draft.overrides_file.write_text(typed, encoding="utf-8")

    if script is not None:
        draft.script_file.write_text(script, encoding="utf-8")
        draft.job_file.write_text(json.dumps(settings(job), indent=2) + "\n", encoding="utf-8")


def _as_yaml(config: Mapping[str, Any]) -> str:
    """Return a configuration as YAML.

    The text of each top-level value is cached. The text is used again if the next configuration has the same
    object.
    """
    for key, value in config.items():
        if key not in _last_texts or _last_texts[key][0] is not value:
            _last_texts[key] = (value, _text_of({key: value}))
    return "".join(_last_texts[key][1] for key in config)


def _text_of(value: Mapping[str, Any]) -> str:
    text = yaml.dump(value, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
    # PyYAML reads the line break U+0085 as a blank unless it is escaped, so this text is dumped as ASCII.
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
    """Copy the files that `write_code` has written from the folder `source` into the folder `draft`."""
    # Files are copied, not linked: a run that writes into a linked file would change the code of other runs.
    for path in source.path.iterdir():
        if path.is_dir():
            shutil.copytree(path, draft.path / path.name, symlinks=True)
        else:
            shutil.copy2(path, draft.path / path.name)


def _put_in_place(draft: RunFolder, place: Path) -> bool:
    """Rename the folder `draft` to `place`; return False if the folder `place` exists already."""
    try:
        draft.path.rename(place)
    except OSError:
        if place.is_dir():
            return False
        raise
    return True


def _update(draft: RunFolder, folder: RunFolder, say: Say) -> None:
    """Replace the files of the run folder by the files in `draft`; call `say` if the code has changed."""
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

    # These files are removed last: if an earlier line fails, a cancelled run stays cancelled.
    folder.cancelled_file.unlink(missing_ok=True)
    folder.stop_file.unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """Replace the file `path` by a file with `content`, unless it has this content already."""
    # An equal file is kept: a node that has cached a file may fail to read its replacement ("Stale file
    # handle").
    if read_bytes(path) != content:
        with replacing(path) as stream:
            stream.write(content)


def _replace_code(new: Path, place: Path, replaced: Path) -> None:
    """Replace the snapshot at `place` by the snapshot `new`, and keep the files that jobs wrote into it.

    If there is no new snapshot, an old snapshot is moved to `replaced`. If jobs wrote files into it, it is
    renamed to `code.old-N` instead.

    Args:
        new: the folder of the new snapshot; it does not exist if the run has no snapshot.
        place: the folder of the snapshot in the run folder.
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
    """Return the first path `PATH.old-1`, `PATH.old-2` and so on that does not exist."""
    name = first_free(f"{path.name}.old-", lambda name: path.with_name(name).exists())
    return path.with_name(name)


@contextmanager
def _beside(place: Path) -> Iterator[RunFolder]:
    """Yield a new private folder next to `place`; remove it at the end, unless it was renamed."""
    # The folder is on the same file system as `place`, so that one rename moves all files at once.
    draft = place.with_name(f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}")
    draft.mkdir(mode=0o700)
    try:
        yield RunFolder(draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _writable_for_us_alone() -> Iterator[None]:
    """Let no other account write to the files that the body creates, whatever the umask is."""
    # os.umask sets the umask and returns the old one; there is no call that only reads it.
    before = os.umask(0o022)
    os.umask(before | 0o022)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Turn an OSError of the body into a ConfigError that names the path and gives advice."""
    # For a run that exists, the hint does not suggest another runs_dir: the run folder can't move.
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
