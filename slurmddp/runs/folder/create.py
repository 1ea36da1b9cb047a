"""Create the run folder: everything that the login side hands to the nodes.

A new folder is built beside its place and renamed, so that an error leaves nothing. If the same command is
given again, the existing folder keeps its logs, metrics and checkpoints, and gets the new settings.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from slurmddp.errors import ConfigError
from slurmddp.host.atomic_file import replacing
from slurmddp.runs.folder import code_snapshot
from slurmddp.runs.folder.freeze import freeze
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import refuse_foreign, warn_if_exposed
from slurmddp.spec import Job

Say = Callable[[str], object]


def prepare(job: Job, script: str | None, say: Say = print, like: RunFolder | None = None) -> RunFolder:
    """Write the run folder of `job`, with `script` as its batch script, and return it.

    Removes the marks of an earlier `cancel` or `stop`. `say` gets a sentence if the code has changed.
    The folder `like` of a run with the same cluster, written just before, gives its snapshot of the code.

    Raises:
        ConfigError: the script can't be parsed, the folder can't be written, or it belongs to another
            account.
    """
    folder = RunFolder(job.run_dir)
    with _draft(job, script, like) as draft:
        if not _put_in_place(draft, folder.path):
            refuse_foreign(folder.path)  # Another account may have created it meanwhile.
            _update(draft, folder, say)
    return folder


def create(job: Job, script: str | None, like: RunFolder | None = None) -> bool:
    """Write the run folder of a new run as `prepare` does; return False if it exists, and leave it."""
    with _draft(job, script, like) as draft:
        return _put_in_place(draft, job.run_dir)


@contextmanager
def _draft(job: Job, script: str | None, like: RunFolder | None) -> Iterator[Path]:
    if script is not None and like is None:  # The same cluster has the same `setup` lines.
        check_syntax(script)
    place = RunFolder(job.run_dir).path
    refuse_foreign(place)
    with _writable(place), _writable_for_us_alone():
        place.parent.mkdir(parents=True, exist_ok=True)
        with _beside(place) as draft:
            _fill(draft, job, script, like)
            yield draft
    warn_if_exposed(place)


def check_syntax(script: str) -> None:
    """Raise ConfigError if bash can't parse `script`, because of the `setup` lines of a cluster file."""
    bash = shutil.which("bash")
    if bash is None:
        return
    done = subprocess.run([bash, "-n"], input=script, capture_output=True, text=True, errors="replace")
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise ConfigError(
            f"bash can't read the batch script: {words[0] if words else 'no reason given'}.",
            hint="Look for an open quote or block in the `setup` lines of the cluster file.",
        )


def _fill(draft: Path, job: Job, script: str | None, like: RunFolder | None) -> None:
    """Write all files of a submission into the empty folder `draft`."""
    (draft / "logs").mkdir()
    config = yaml.safe_dump(dict(job.program.config), sort_keys=False, allow_unicode=True)
    if "\x85" in config:  # PyYAML reads this line break as a blank unless it is escaped.
        config = yaml.safe_dump(dict(job.program.config), sort_keys=False)
    (draft / "config.yaml").write_text(config, encoding="utf-8")
    typed = "".join(f"{shlex.quote(word)}\n" for word in job.overrides)
    (draft / "overrides.txt").write_text(typed, encoding="utf-8")
    if script is not None:
        freeze(draft, job, script)
    if job.snapshot:
        (draft / "code.txt").write_text(f"{_take_code(draft, job, like)}\n", encoding="utf-8")


def _take_code(draft: Path, job: Job, like: RunFolder | None) -> str:
    if like is not None:
        code_snapshot.share(like.code_dir, draft / "code")
        return like.code_note_file.read_text(encoding="utf-8").strip()
    runs = job.run_dir.parent
    project = job.project_dir
    exclude = [draft, job.run_dir] if project.is_relative_to(runs) else [runs]
    return code_snapshot.take(project, draft / "code", exclude=exclude)


def _put_in_place(draft: Path, place: Path) -> bool:
    """Rename the draft to its place; return False if a run exists there."""
    try:
        draft.rename(place)
    except OSError:
        if place.is_dir():
            return False
        raise
    return True


def _update(draft: Path, folder: RunFolder, say: Say) -> None:
    """Replace the files of an existing run by the files of a submission, each at once."""
    (folder.path / "logs").mkdir(exist_ok=True)
    for name in ("config.yaml", "overrides.txt", "job.json", "job.pyz", "job.sbatch", "code.txt"):
        if (draft / name).exists():
            with replacing(folder.path / name) as stream:
                stream.write((draft / name).read_bytes())
    if not (draft / "code.txt").exists():
        folder.code_note_file.unlink(missing_ok=True)
    _replace_code(draft / "code", folder.code_dir, draft / "replaced", say)
    folder.cancelled_file.unlink(missing_ok=True)
    folder.stop_file.unlink(missing_ok=True)


def _replace_code(new: Path, place: Path, replaced: Path, say: Say) -> None:
    """Replace the old snapshot by the new one, or by none; keep the files that a job wrote there."""
    if not new.is_dir():
        if code_snapshot.written_beside(place):
            place.rename(free_name(place))
        elif place.is_dir():
            place.rename(replaced)
        return
    if place.is_dir():
        changed = code_snapshot.differences(place, new)
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            say(f"The code has changed since the last submission: {', '.join(changed[:3])}{more}.")
        code_snapshot.carry_over(place, new)
        place.rename(replaced)
    new.rename(place)


def free_name(path: Path) -> Path:
    """Return the first `NAME.old-N` that is free beside `path`."""
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    return aside


@contextmanager
def _beside(place: Path) -> Iterator[Path]:
    """Yield a new folder next to `place`, private to this account, and remove its rest afterwards."""
    draft = place.with_name(f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}")
    draft.mkdir(mode=0o700)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _writable_for_us_alone() -> Iterator[None]:
    """Create files that no other account can write to, whatever the umask is."""
    before = os.umask(0o022)
    os.umask(before | 0o022)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    hint = "With runs_dir=, choose a folder on a filesystem that all nodes share and you may write to."
    if folder.is_dir():  # The place of an existing run can't change.
        hint = "Make it writable for this account, or make room there."
    try:
        yield
    except OSError as error:
        where = Path(error.filename).parent if isinstance(error.filename, str) else folder.parent
        raise ConfigError(
            f"The run folder can't be written in {where}: {error.strerror or error}.", hint=hint
        ) from error
