"""Read and write the record of a sandbox, by which later commands find it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from slurmddp.errors import SlurmError
from slurmddp.host.atomic_file import replacing
from slurmddp.near_matches import near_matches
from slurmddp.sandbox import plan
from slurmddp.sandbox.plan import RECORD, Plan


def home(environ: Mapping[str, str]) -> Path:
    """Return the folder that holds the sandboxes of this user."""
    state = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".local/state")
    return Path(state) / "slurmddp" / "sandbox"


def names(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the sandboxes that exist in the user's state folder."""
    return sorted(path.parent.name for path in home(environ).glob(f"*/{RECORD}"))


def exists(root: Path) -> bool:
    """Return whether there is a sandbox in `root`, running or not."""
    return (root / RECORD).exists()


def is_free(root: Path) -> bool:
    """Return whether the folder `root` is empty, except for an incomplete record."""
    return all(path.name.startswith(f".{RECORD}.") for path in root.iterdir())


def write(root: Path, layout: Plan) -> None:
    """Record the plan of the sandbox in `root`."""
    with replacing(root / RECORD) as stream:
        stream.write(json.dumps({"plan": asdict(layout)}, indent=1, default=str).encode())


def read(root: Path, name: str) -> Plan:
    """Return the plan of the sandbox in `root`; raise SlurmError if there is no such sandbox."""
    try:
        return plan.from_json(json.loads((root / RECORD).read_text(encoding="utf-8")))
    except FileNotFoundError:
        near = near_matches(name, names(os.environ))
        raise SlurmError(
            f"No sandbox {name!r} is up in {root}.",
            hint="Start it with `slurmddp sandbox up`. A sandbox of `up --dir DIR` needs the same --dir. "
            f"{near}".strip(),
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise SlurmError(
            f"{root / RECORD} is damaged ({error}).",
            hint="End the processes that `ps` shows for that folder, then delete the folder.",
        ) from error
