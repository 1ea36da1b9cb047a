"""Record in each checkpoint the program that writes it, so that no other program continues it."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import slurmddp
from slurmddp.checkpoint.files.manifest import checkpoint_folders, folder_name, load_manifest, program_of
from slurmddp.errors import CheckpointError
from slurmddp.runs.folder.config_secrets import NOT_SHOWN
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.runs.text_format import duration

_PACKAGE = Path(slurmddp.__file__).parent
_SECRET = re.compile(r"token|secret|passw|credential|(api|access|private)[-_.]?key", re.IGNORECASE)
"""Matches names of arguments with secret values, which are not stored: many may read a checkpoint."""
_COMMAND_CHARS = 500
"""The largest number of characters of a command that a checkpoint stores."""


@dataclass(frozen=True)
class UserProgram:
    """The program that the user started: a script or module, with its arguments."""

    file: str
    """The program's file, relative to the folder in which it was started; outside of it, the name alone."""
    command: str
    """The file and its arguments, for people."""

    @classmethod
    def current(cls, run: RunContext) -> UserProgram | None:
        """Return the program of this process.

        None without a script (a notebook, an interactive shell, `python -c`), and for slurmddp's own modules.
        """
        file = getattr(sys.modules.get("__main__"), "__file__", None)
        if not file or Path(file).resolve().is_relative_to(_PACKAGE):
            return None

        name = _named(Path(file).absolute(), run)
        arguments = _without_secrets(sys.argv[1:])
        return cls(name, shlex.join([name, *arguments])[:_COMMAND_CHARS])

    def facts(self) -> dict[str, Any]:
        """Return the metadata for the manifest of a checkpoint: file, command and the current time."""
        return {"program": {"file": self.file, "command": self.command, "time": round(time.time())}}


def refuse_other(meta: Mapping[str, Any], program: UserProgram | None, root: Path) -> None:
    """Raise CheckpointError if another program than `program` wrote the newest checkpoint of `root`.

    Args:
        meta: the metadata in the manifest of that checkpoint. Earlier versions recorded no program; their
            checkpoints are not refused.
        program: the program whose checkpoints are expected; None: any.
        root: the folder of all checkpoints.
    """
    saved = meta.get("program")
    if program is None or saved is None or saved["file"] == program.file:
        return

    raise CheckpointError(
        f"The checkpoints in {root} belong to another program: {saved['command']} saved the newest "
        f"checkpoint {_ago(saved)}, and this program is {program.file}. Nothing was loaded.",
        hint=f"Give {program.file} a folder of its own: root=FOLDER in load and in save. Or delete {root}. "
        f"To load them all the same, name the folder: load(..., root={root.name!r}).",
    )


def shared_folder_line(root: Path, program: UserProgram | None) -> str:
    """Return a line to print if the folder for saves contains checkpoints of another program, else "".

    Saves don't delete checkpoints of another program, but `load` takes the newest one of any program.
    """
    if program is None:
        return ""
    names = {program_of(folder) for folder in checkpoint_folders(root)} - {None, program.file}
    if not names:
        return ""

    others = " and ".join(sorted(map(str, names)))
    return (
        f"slurmddp: {shown(root)} also contains checkpoints of {others}. They are kept; a checkpoint of the "
        f"step of a save is renamed to abandoned-step-N. Give {program.file} a folder of its own: "
        "root=FOLDER in save and in load."
    )


def loaded_line(root: Path, step: int, program: UserProgram | None, *, is_chosen: bool) -> str:
    """Return a line to print about the checkpoint that was loaded.

    Args:
        root: the folder of all checkpoints.
        step: the step of the checkpoint.
        program: the program of this process.
        is_chosen: whether the program has called `load` with `step` or `best`.
    """
    saved = load_manifest(root / folder_name(step)).meta.get("program")
    origin = ""
    if saved is not None:
        origin = f"saved {_ago(saved)} by {saved['command']}"
        if program is not None and saved["command"] != program.command:
            origin += f"; this is {program.command}"
        origin = f" ({origin})"
    verb = "loaded" if is_chosen else "resuming from"
    return f"slurmddp: {verb} step {step} of {shown(root)}{origin}"


def nothing_left_line(root: Path, step: int) -> str:
    """Return a line to print about a training that took no step after its load."""
    return (
        f"slurmddp: no step followed step {step} of {shown(root)}: nothing was left to train. "
        "To start from step 0, delete that folder or pass another folder as root=."
    )


def shown(root: Path) -> str:
    """Return the path of a folder for messages: relative to the working directory if below it."""
    root = root.absolute()
    if root.is_relative_to(Path.cwd()):
        return f"./{root.relative_to(Path.cwd())}"
    return str(root)


def _named(file: Path, run: RunContext) -> str:
    """Return the path of a script relative to the run's copy of the code, or to the working directory.

    So the copy of a script has the same name as the script. Outside of both folders: the file name alone.
    """
    places = [Path.cwd()] if run.folder is None else [run.folder.code_dir, Path.cwd()]
    for place in places:
        if file.is_relative_to(place):
            return str(file.relative_to(place))
    return file.name


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with NOT_SHOWN in place of values whose option names look like secrets."""
    kept: list[str] = []
    hides_next = False

    for argument in arguments:
        name, sign, _ = argument.partition("=")
        is_secret = _SECRET.search(name) is not None

        if hides_next and not argument.startswith("-"):
            kept.append(NOT_SHOWN)
        elif is_secret and sign:
            kept.append(f"{name}={NOT_SHOWN}")
        else:
            kept.append(argument)

        # In `--token VALUE` the value is the next argument, so hide that one.
        hides_next = is_secret and not sign and argument.startswith("-")

    return kept


def _ago(saved: Mapping[str, Any]) -> str:
    return f"{duration(time.time() - saved['time'])} ago"
