"""Call a tool in a process of its own, and return the document of its result or of its error.

An action may wait for SLURM, run code of the project's configuration, or print. In a process of its own it
delays no other call, reads the present files, and writes nothing between the messages of the protocol.
"""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from slurmddp.control.json_encoding import to_json
from slurmddp.control.ssh.error_encoding import error_to_json
from slurmddp.errors import EXIT_CODES, SlurmddpError, UsageError, plain
from slurmddp.mcp_server.shortening import shortened
from slurmddp.mcp_server.tools import TOOLS, Tools
from slurmddp.near_matches import near_matches

ERROR = "error"
"""The key of an error's document; a result has no such key."""
_PROCESSES = multiprocessing.get_context("forkserver")
"""Starts processes by a fork of a process without threads, which has imported the actions already."""
_PROCESSES.set_forkserver_preload([__name__, "slurmddp.config.job"])


def input_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of the arguments of a tool."""
    return _arguments_of(name, Tools(writes=False)).json_schema()


def call(name: str, arguments: Mapping[str, Any], *, writes: bool) -> dict[str, Any]:
    """Call a tool in a new process.

    Args:
        name: the name of the tool.
        arguments: its arguments, which are not checked yet.
        writes: whether the server has the tools that start or change runs.

    Returns:
        The document of the result, with the key `messages`; or of the error, under the key `ERROR`.
    """
    tools = [tool for tool in TOOLS if writes or not TOOLS[tool].writes]
    if name not in tools:
        hint = near_matches(name, tools)
        if name in TOOLS:
            hint = "This server is read-only: a person may start it with `slurmddp mcp --write`."
        return _error_document(UsageError(f"There is no tool {name!r}.", hint=hint))

    reader, writer = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_perform, args=(writer, name, arguments, writes))
    process.start()
    # Only the new process holds the writing end now, so that its end is the end of the pipe.
    writer.close()
    try:
        document: dict[str, Any] = reader.recv()
    except EOFError:
        process.join()
        error = SlurmddpError(
            f"The process of the tool {name} ended with exit code {process.exitcode}, without a result.",
            hint="The log of the server shows what it printed, and `status` what was done.",
        )
        return _error_document(error)

    process.join()
    return document


def _arguments_of(name: str, tools: Tools) -> TypeAdapter[Any]:
    """Return an adapter that checks the arguments of a tool and calls it."""
    return TypeAdapter(getattr(tools, TOOLS[name].method))


def _perform(writer: Connection, name: str, arguments: Mapping[str, Any], writes: bool) -> None:
    """Call a tool, and send the document of its result or of its error."""
    writer.send(_document(name, arguments, writes=writes))


def _document(name: str, arguments: Mapping[str, Any], *, writes: bool) -> dict[str, Any]:
    """Call a tool, and return the document of its result, shortened and with messages, or of its error."""
    tools = Tools(writes=writes)
    try:
        result = _arguments_of(name, tools).validate_python(ArgsKwargs((), dict(arguments)))
    except SlurmddpError as error:
        return _error_document(error)
    except ValidationError as error:
        return _error_document(_wrong_arguments(name, error))
    except OSError as error:
        return _error_document(SlurmddpError(f"{plain(error)}."))
    except Exception as error:
        traceback.print_exception(error, file=sys.stderr)
        hint = "This is a bug in slurmddp; please report it with the traceback in the log of this server."
        return _error_document(SlurmddpError(f"{type(error).__name__}: {error}.", hint=hint))

    document, cuts = shortened(to_json(result))
    if cuts:
        cuts.append(f"Ask for less, or type `slurmddp {name} --json` in a shell, which prints all of it.")
    return {**document, "messages": [*tools.messages, *cuts]}


def _wrong_arguments(name: str, error: ValidationError) -> UsageError:
    """Return the error for arguments that a tool does not take, or with values that it does not take."""
    faults = [f"`{'.'.join(map(str, fault['loc']))}`: {fault['msg']}" for fault in error.errors()]
    known = ", ".join(input_schema(name)["properties"])
    return UsageError(
        f"The arguments of the tool {name} are wrong: {'; '.join(faults)}.", hint=f"It takes {known}."
    )


def _error_document(error: SlurmddpError) -> dict[str, Any]:
    """Return the document of an error: what happened, what to do, and its exit code with its meaning."""
    code = EXIT_CODES.get(error.exit_code)
    return {ERROR: {**error_to_json(error), "meaning": code.text if code else ""}}
