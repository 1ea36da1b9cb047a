"""The format of a checkpoint folder: its name, its manifest, and the verification of both.

It needs no torch, so that commands on the login node can list, verify and export checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmddp.checkpoint.files.durable import ALGORITHM, FileRecord, record_of
from slurmddp.errors import CheckpointError
from slurmddp.host.regular_file import read_regular
from slurmddp.runs.folder.late_files import is_there

FORMAT = 2
MANIFEST_FILE = "manifest.json"
POINTER_FILE = "latest"
TENSORS_FILE = "state.safetensors"
TREE_FILE = "state.json"
WRITING, REPLACED, DELETING, PARTS = ".writing-", ".replaced-", ".deleting-", ".parts-"
BAD, ABANDONED = "bad-", "abandoned-"
"""Prefixes of checkpoints that are never loaded: damaged ones, and ones of steps that a training has left."""

_OTHER_VERSION = "Use the slurmddp that wrote it; nothing in it was changed."
_FOLDER = re.compile(r"step-(\d{10,})")
_RENAMED = re.compile(r"[a-z]+-step-(\d{10,})(-\d+)?")


class OtherVersionError(CheckpointError):
    """Another slurmddp wrote the checkpoint. It is not damaged, so it is neither quarantined nor skipped."""


@dataclass(frozen=True)
class Manifest:
    """Step, files with size and digest, software versions and the caller's facts of one checkpoint."""

    step: int
    files: Mapping[str, FileRecord]
    meta: Mapping[str, Any]
    versions: Mapping[str, str]

    def to_json(self) -> str:
        """Return the text of the manifest, with a digest of its content."""
        content = {
            "format": FORMAT,
            "digest": ALGORITHM,
            "step": self.step,
            "files": {name: asdict(record) for name, record in self.files.items()},
            "versions": dict(self.versions),
            "meta": dict(self.meta),
        }
        return json.dumps({**content, "sha256": _digest(content)}, indent=2) + "\n"


def shard_file(rank: int) -> str:
    """Return the name of the file with a rank's shards of the sharded tensors."""
    return f"shard-{rank:05d}.safetensors"


def is_shard_file(name: str) -> bool:
    """Tell whether a file of a checkpoint holds a rank's shards."""
    return name.startswith("shard-")


def folder_name(step: int) -> str:
    return f"step-{step:010d}"


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint folder's name, or None for any other name."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoint_folders(root: Path) -> list[Path]:
    """Return the checkpoint folders under `root`, newest step first, verified or not."""
    if not (is_there(root) and root.is_dir()):
        return []
    steps = [(step, path) for path in root.iterdir() if (step := step_of(path)) is not None]
    return [path for _, path in sorted(steps, reverse=True)]


def program_of(folder: Path) -> str | None:
    """Return the name of the program that wrote a checkpoint; None if its manifest does not name one."""
    try:
        program = load_manifest(folder).meta.get("program")
    except (CheckpointError, OSError):
        return None
    return None if program is None else str(program["file"])


def are_of_one_program(folder: Path, other: Path) -> bool:
    """Return whether one program may have written two checkpoints; an unknown program may be any."""
    names = {program_of(folder), program_of(other)} - {None}
    return len(names) < 2


def renamed_folders(root: Path, prefix: str) -> list[tuple[int, Path]]:
    """Return steps and folders of the checkpoints under `root` with a prefix, newest step first."""
    named = [(_RENAMED.fullmatch(path.name), path) for path in root.glob(f"{prefix}*")]
    found = [(int(match[1]), path) for match, path in named if match]
    return sorted(found, key=lambda one: (-one[0], one[1].name))


def newest_step(root: Path) -> int | None:
    """Return the step of the newest checkpoint by its name, verified or not; None without a checkpoint."""
    return next((step_of(folder) for folder in checkpoint_folders(root)), None)


def load_manifest(folder: Path) -> Manifest:
    """Read and check the manifest; raises CheckpointError if it is damaged, OSError if unreadable."""
    try:
        content = json.loads(read_regular(folder / MANIFEST_FILE))
        recorded = content.pop("sha256")
        if recorded != _digest(content):
            raise CheckpointError(f"{MANIFEST_FILE} does not match its own hash.")
        check_format(content["format"])
        if content["digest"] != ALGORITHM:
            raise OtherVersionError(
                f"its files are hashed by {content['digest']!r}; this slurmddp knows {ALGORITHM}.",
                hint=_OTHER_VERSION,
            )
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        manifest = Manifest(content["step"], files, content["meta"], content["versions"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} is missing.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} is damaged.") from error
    named = step_of(folder)
    if named is not None and named != manifest.step:
        raise CheckpointError(f"{MANIFEST_FILE} is of step {manifest.step}.")
    return manifest


def check_format(found: int) -> None:
    """Raise OtherVersionError unless this slurmddp reads format `found`."""
    if found != FORMAT:
        raise OtherVersionError(
            f"it has format {found}; this slurmddp reads format {FORMAT}.", hint=_OTHER_VERSION
        )


def verify(folder: Path) -> Manifest:
    """Compare every byte of a checkpoint with its manifest.

    Raises:
        CheckpointError: a file is missing or damaged; the message names it.
        OSError: a file can't be read.
    """
    manifest = load_manifest(folder)
    for name, expected in manifest.files.items():
        check_size(folder / name, expected)
    for name, expected in manifest.files.items():
        check_record(name, record_of(folder / name), expected)
    return manifest


def require_state(manifest: Manifest) -> None:
    """Raise CheckpointError unless the checkpoint has the files that `checkpoint.write` writes."""
    for name in (TENSORS_FILE, TREE_FILE):
        if name not in manifest.files:
            raise CheckpointError(f"the manifest does not list {name}.")


def check_size(path: Path, expected: FileRecord) -> None:
    """Raise CheckpointError if a file is missing or its size differs from the manifest."""
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path.name} is missing.") from error
    if size != expected.size:
        raise CheckpointError(f"{path.name} has {size} bytes instead of {expected.size}.")


def check_record(name: str, found: FileRecord, expected: FileRecord) -> None:
    """Raise CheckpointError if size or digest of a file differ from the manifest."""
    if found != expected:
        raise CheckpointError(f"{name} does not match its hash: it changed after it was written.")


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
