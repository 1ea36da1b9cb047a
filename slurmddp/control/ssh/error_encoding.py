"""Convert errors to JSON and back: the laptop raises the error that an action raised on the login node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmddp import errors
from slurmddp.control.json_encoding import VERSION
from slurmddp.errors import SlurmddpError


def error_to_json(error: SlurmddpError) -> dict[str, Any]:
    """Convert an error to a JSON document, from which `error_from_json` makes the same error elsewhere."""
    return {
        "version": VERSION,
        "kind": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "exit_code": error.exit_code,
    }


def error_from_json(document: Mapping[str, Any]) -> SlurmddpError:
    """Return the error from which `error_to_json` made a document; SlurmddpError if its class is unknown."""
    kind = vars(errors).get(document["kind"])
    if not isinstance(kind, type) or not issubclass(kind, SlurmddpError):
        # The other machine raised an error whose class is not in `errors`: it belongs to another module or to
        # another version of slurmddp.
        kind = SlurmddpError

    error: SlurmddpError = kind(document["message"], hint=document["hint"])
    error.exit_code = document["exit_code"]

    return error
