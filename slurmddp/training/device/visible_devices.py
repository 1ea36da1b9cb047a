"""Read which devices CUDA_VISIBLE_DEVICES names: by index, by UUID or as MIG devices."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slurmddp.errors import MismatchError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_KINDS = (re.compile(r"\d+"), re.compile("GPU-."), re.compile("MIG-."))
"""The kinds of device names: an index (CUDA reads its leading digits), a UUID, a MIG device."""


def visible_names(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the device names that CUDA reads from CUDA_VISIBLE_DEVICES; None if the variable is not set.

    CUDA stops at the first name that is invalid or has another form (index, GPU UUID or MIG UUID) than the
    first name.

    Raises:
        MismatchError: the variable contains a name twice; CUDA then shows no device at all.
    """
    text = environ.get(VISIBLE)
    if text is None:
        return None

    listed = [name.strip() for name in text.split(",")]
    kind = next((kind for kind in _KINDS if kind.match(listed[0])), None)
    names: list[str] = []
    for name in listed:
        if kind is None or not kind.match(name):
            break
        if name in names:
            raise MismatchError(
                f"{VISIBLE}={text!r} names {name} twice, and CUDA then shows no device.",
                hint="Name each device once; each rank needs its own.",
            )

        names.append(name)

    return tuple(names)


def visible_mig_devices(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the MIG devices in CUDA_VISIBLE_DEVICES; empty if there are none."""
    names = visible_names(environ)
    if not names or not names[0].startswith("MIG-"):
        return ()
    return names


def ignored_names(environ: Mapping[str, str]) -> str:
    """Return a sentence about the first name in CUDA_VISIBLE_DEVICES that CUDA ignores.

    It is empty if CUDA reads all names.
    """
    names = visible_names(environ)
    if not names:
        return ""

    text = environ[VISIBLE]
    ignored = text.split(",")[len(names) :]
    if not ignored:
        return ""
    return f" CUDA ignores {ignored[0].strip()!r} and all names after it in {VISIBLE}={text!r}."


def device_identity(environ: Mapping[str, str], index: int, uuid: object) -> str:
    """Return a name that no other device has: the name of a MIG device, or `uuid`.

    MIG devices may have the UUID of their GPU, which would not distinguish them.

    Args:
        environ: the environment of this rank.
        index: the CUDA index of the device.
        uuid: its UUID by torch.
    """
    names = visible_mig_devices(environ)
    if index < len(names):
        return names[index]
    return str(uuid)
