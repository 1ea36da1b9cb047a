"""The format of a checkpoint folder: its name, its manifest, and the verification of both.

The module needs no torch, so that commands on the login node can list, verify and export checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmddp.checkpoint.files.digest import ALGORITHM, FileRecord, record_of
from slurmddp.errors import CheckpointError
from slurmddp.host.regular_file import read_regular
from slurmddp.runs.folder.late_files import is_there

FORMAT = 2
MANIFEST_FILE = "manifest.json"
POINTER_FILE = "latest"
TENSORS_FILE = "state.safetensors"
TREE_FILE = "state.json"
# Prefixes of hidden folders: a checkpoint that is being written, replaced or deleted, and the parts of one.
WRITING = ".writing-"
REPLACED = ".replaced-"
DELETING = ".deleting-"
PARTS = ".parts-"
# Prefixes of checkpoints that are never loaded: damaged, or of steps from which a training has gone back.
BAD = "bad-"
ABANDONED = "abandoned-"

_OTHER_VERSION = "Use the slurmddp that wrote it; nothing in it was changed."
_FOLDER = re.compile(r"step-(\d{10,})")
_RENAMED = re.compile(r"[a-z]+-step-(\d{10,})(-\d+)?")


class OtherVersionError(CheckpointError):
    """Another slurmddp wrote the checkpoint. It is not damaged, so it is neither quarantined nor skipped."""


@dataclass(frozen=True)
class Manifest:
    """Step, files with size and digest, the caller's facts, and software versions of a checkpoint."""

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
    """Return whether a file of a checkpoint contains a rank's shards."""
    return name.startswith("shard-")


def folder_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:010d}"


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint folder's name, or None for any other name."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoint_folders(root: Path) -> list[Path]:
    """Return the checkpoint folders under `root`, newest step first, verified or not."""
    if not (is_there(root) and root.is_dir()):
        return []

    checkpoints = []
    for path in root.iterdir():
        step = step_of(path)
        if step is not None:
            checkpoints.append((step, path))

    return [path for _, path in sorted(checkpoints, reverse=True)]


def program_of(folder: Path) -> str | None:
    """Return the name of the program that wrote a checkpoint; None if its manifest names no program."""
    try:
        program = load_manifest(folder).meta.get("program")
    except (CheckpointError, OSError):
        return None

    return None if program is None else str(program["file"])


def are_of_one_program(folder: Path, other: Path) -> bool:
    """Return whether one program may have written both checkpoints; an unknown program may be any program."""
    names = {program_of(folder), program_of(other)} - {None}
    return len(names) < 2


def renamed_folders(root: Path, prefix: str) -> list[tuple[int, Path]]:
    """Return steps and folders of the checkpoints under `root` with a prefix, newest step first."""
    checkpoints = []
    for path in root.glob(f"{prefix}*"):
        match = _RENAMED.fullmatch(path.name)
        if match:
            checkpoints.append((int(match[1]), path))

    return sorted(checkpoints, key=lambda checkpoint: (-checkpoint[0], checkpoint[1].name))


def newest_step(root: Path) -> int | None:
    """Return the step of the newest checkpoint by its name, verified or not; None without a checkpoint."""
    return next((step_of(folder) for folder in checkpoint_folders(root)), None)


def load_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        CheckpointError: the manifest is missing or damaged, or another slurmddp wrote it.
        OSError: the manifest can't be read.
    """
    try:
        content = json.loads(read_regular(folder / MANIFEST_FILE))
        recorded = content.pop("sha256")
        if recorded != _digest(content):
            raise CheckpointError(f"{MANIFEST_FILE} does not match its own hash.")

        check_format(content["format"])
        if content["digest"] != ALGORITHM:
            raise OtherVersionError(
                f"its files are hashed by {content['digest']!r}; this slurmddp supports {ALGORITHM}.",
                hint=_OTHER_VERSION,
            )

        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        manifest = Manifest(content["step"], files, content["meta"], content["versions"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} is missing.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} is damaged.") from error

    # A folder that is being written, or was renamed, has no step in its name.
    step = step_of(folder)
    if step is not None and step != manifest.step:
        raise CheckpointError(f"{MANIFEST_FILE} is of step {manifest.step}.")
    return manifest


def check_format(version: int) -> None:
    """Raise OtherVersionError unless this slurmddp reads the format `version`."""
    if version != FORMAT:
        raise OtherVersionError(
            f"it has format {version}; this slurmddp reads format {FORMAT}.", hint=_OTHER_VERSION
        )


def verify(folder: Path) -> Manifest:
    """Compare every byte of a checkpoint with its manifest.

    Raises:
        CheckpointError: a file is missing or damaged; the message names it.
        OSError: a file can't be read.
    """
    manifest = load_manifest(folder)
    # Sizes first: a missing or short file is found before gigabytes are read.
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


def check_record(name: str, record: FileRecord, expected: FileRecord) -> None:
    """Raise CheckpointError if size or digest of a file differs from the manifest."""
    if record != expected:
        raise CheckpointError(f"{name} does not match its hash: it changed after it was written.")


def _digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
