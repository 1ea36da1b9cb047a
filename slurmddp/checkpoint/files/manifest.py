"""Define the format of a checkpoint folder, read and write its manifest, and verify its files.

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
# Prefixes of hidden folders. They contain a checkpoint that is being written, replaced or deleted, or (PARTS)
# the files that several processes write for one checkpoint.
WRITING = ".writing-"
REPLACED = ".replaced-"
DELETING = ".deleting-"
PARTS = ".parts-"
# Prefixes of checkpoints that are never loaded: damaged checkpoints, and checkpoints that a training
# abandoned when it went back to an earlier step.
BAD = "bad-"
ABANDONED = "abandoned-"

_OTHER_VERSION = "Use the slurmddp that wrote it; nothing in it was changed."
_FOLDER = re.compile(r"step-(\d{10,})")
_RENAMED = re.compile(r"[a-z]+-step-(\d{10,})(-\d+)?")


class DamagedError(CheckpointError):
    """The bytes of a checkpoint differ from those that were written. An older checkpoint may be undamaged."""


class OtherVersionError(CheckpointError):
    """Another version of slurmddp wrote the checkpoint, and this version can't read it.

    The checkpoint is not damaged, so it is neither quarantined nor skipped.
    """


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint's manifest: step, files, metadata of the caller, and software versions."""

    step: int
    files: Mapping[str, FileRecord]
    meta: Mapping[str, Any]
    versions: Mapping[str, str]

    def to_json(self) -> str:
        """Return the JSON text of the manifest, with the SHA-256 of its content as the key "sha256"."""
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
    """Return the name of the file that contains a rank's shards of all sharded tensors."""
    return f"shard-{rank:05d}.safetensors"


def is_shard_file(name: str) -> bool:
    """Return whether a checkpoint file with this name contains a rank's shards."""
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
    """Return the file of the program that wrote a checkpoint; None if no readable manifest names it."""
    try:
        program = load_manifest(folder).meta.get("program")
    except (CheckpointError, OSError):
        return None

    return None if program is None else str(program["file"])


def are_of_one_program(folder: Path, other: Path) -> bool:
    """Return False if the manifests of two checkpoints name different programs, otherwise True.

    A manifest that names no program, or can't be read, is no evidence of another program.
    """
    names = {program_of(folder), program_of(other)} - {None}
    return len(names) < 2


def renamed_folders(root: Path, prefix: str) -> list[tuple[int, Path]]:
    """Return step and folder of each renamed checkpoint under `root`, newest step first.

    Args:
        root: the folder of all checkpoints.
        prefix: the prefix that the rename has put before the name, BAD or ABANDONED.
    """
    checkpoints = []
    for path in root.glob(f"{prefix}*"):
        match = _RENAMED.fullmatch(path.name)
        if match:
            checkpoints.append((int(match[1]), path))

    return sorted(checkpoints, key=lambda checkpoint: (-checkpoint[0], checkpoint[1].name))


def newest_step(root: Path) -> int | None:
    """Return the greatest step among the names of checkpoint folders under `root`; None without any."""
    return next((step_of(folder) for folder in checkpoint_folders(root)), None)


def load_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        CheckpointError: the manifest is missing, or belongs to another step than the folder.
        DamagedError: the manifest is damaged.
        OtherVersionError: this version of slurmddp can't read the format.
        OSError: the manifest can't be read.
    """
    try:
        content = json.loads(read_regular(folder / MANIFEST_FILE))
        recorded = content.pop("sha256")
        if recorded != _digest(content):
            raise DamagedError(f"{MANIFEST_FILE} does not match its own hash.")

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
        raise DamagedError(f"{MANIFEST_FILE} is damaged.") from error

    # `step_of` is None for a folder that is being written or was renamed. Its name is not compared.
    step = step_of(folder)
    if step is not None and step != manifest.step:
        raise CheckpointError(f"{MANIFEST_FILE} names step {manifest.step}, but the folder is {folder.name}.")
    return manifest


def check_format(version: int) -> None:
    """Raise OtherVersionError unless this version of slurmddp reads the checkpoint format `version`."""
    if version != FORMAT:
        raise OtherVersionError(
            f"it has format {version}; this slurmddp reads format {FORMAT}.", hint=_OTHER_VERSION
        )


def verify(folder: Path) -> Manifest:
    """Compare every byte of a checkpoint with its manifest, and return the manifest.

    Raises:
        CheckpointError: a file is missing; the message names it.
        DamagedError: a file is damaged; the message names it.
        OSError: a file can't be read.
    """
    manifest = load_manifest(folder)
    # Compare all sizes first, so that a missing or short file is found before gigabytes are read.
    for name, expected in manifest.files.items():
        check_size(folder / name, expected)
    for name, expected in manifest.files.items():
        check_record(name, record_of(folder / name), expected)

    return manifest


def require_state(manifest: Manifest) -> None:
    """Raise CheckpointError unless the manifest lists the files state.safetensors and state.json."""
    for name in (TENSORS_FILE, TREE_FILE):
        if name not in manifest.files:
            raise CheckpointError(f"the manifest does not list {name}.")


def check_size(path: Path, expected: FileRecord) -> None:
    """Raise CheckpointError if a file is missing, and DamagedError if its size differs from the manifest."""
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path.name} is missing.") from error

    if size != expected.size:
        raise DamagedError(f"{path.name} has {size} bytes instead of {expected.size}.")


def check_record(name: str, record: FileRecord, expected: FileRecord) -> None:
    """Raise DamagedError if size or digest of a file differs from the manifest."""
    if record != expected:
        raise DamagedError(f"{name} does not match its hash: it changed after it was written.")


def _digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
