"""Serve the tools over standard input and output, each call in a process of its own.

An action may wait for SLURM, run code of the project's configuration, or print. In a process of its own it
delays no other call, reads today's files, and writes nothing between the messages of the protocol.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import wraps
from multiprocessing.connection import Connection
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.tools import Tool as ServerTool
from mcp_types import CallToolResult, TextContent, ToolAnnotations

from slurmddp import __version__
from slurmddp.control.json_encoding import to_json
from slurmddp.control.ssh.error_encoding import error_to_json
from slurmddp.errors import EXIT_CODES, SlurmddpError, plain
from slurmddp.mcp_server.shortening import shortened
from slurmddp.mcp_server.tools import TOOLS, Tools

_INSTRUCTIONS = """slurmddp trains PyTorch models on a SLURM cluster or on this machine.
Order: `plan` (read its script and notes), `check` for a cluster job, `submit` with the `id` of the plan,
then `status` and `logs`. A job survives preemption, time limits and lost nodes by itself: `status` shows
its attempts. If a run waits, `explain` says why. `resume` continues a run that stopped, failed or was
cancelled. Results are JSON documents with the keys of `slurmddp ... --json`; `messages` holds warnings, and
what was left out of a long result. An error has `message`, `hint` (what to do) and `exit_code`."""
_PROCESSES = multiprocessing.get_context("forkserver")
"""Starts processes by a fork of a process without threads, which has imported the actions already."""


def serve(*, writes: bool) -> None:
    """Serve the tools until standard input ends.

    Args:
        writes: whether to offer the tools that start or change runs.
    """
    _PROCESSES.set_forkserver_preload(["slurmddp.mcp_server.server", "slurmddp.config.job"])
    tools = [_tool(name, writes=writes) for name, tool in TOOLS.items() if writes or not tool.writes]
    server = MCPServer(
        "slurmddp", version=__version__, instructions=_INSTRUCTIONS, tools=tools, log_level="WARNING"
    )
    server.run("stdio")


def _tool(name: str, *, writes: bool) -> ServerTool:
    """Return the tool with a name, as the server offers it."""
    tool = TOOLS[name]
    method = getattr(Tools(writes=writes), tool.method)
    # Over ssh, a plan and a check copy the project's code to the login node, which only `writes` allows.
    is_reading = not tool.writes and not (writes and name in ("plan", "check"))
    offered = ServerTool.from_function(
        _calling(name, method, writes=writes),
        name=name,
        description=_description(method),
        annotations=ToolAnnotations(
            title=f"slurmddp {name}",
            read_only_hint=is_reading,
            destructive_hint=tool.destroys,
            idempotent_hint=tool.repeats,
            open_world_hint=False,
        ),
        structured_output=False,
    )

    # A misspelled argument would otherwise be ignored, and the tool would act without it.
    arguments = offered.fn_metadata.arg_model
    arguments.model_config["extra"] = "forbid"
    arguments.model_rebuild(force=True)
    offered.parameters = arguments.model_json_schema(by_alias=True)

    return offered


def _description(method: Callable[..., Any]) -> str:
    """Return the docstring of a method, with each paragraph on one line."""
    paragraphs = (method.__doc__ or "").split("\n\n")
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).strip()


def _calling(name: str, method: Callable[..., Any], *, writes: bool) -> Callable[..., CallToolResult]:
    """Return a function with the arguments of a method, which calls the tool in another process."""

    @wraps(method)
    def call(**arguments: Any) -> CallToolResult:
        document = _in_process(name, arguments, writes=writes)
        text = TextContent(type="text", text=json.dumps(document, indent=1, allow_nan=False))
        return CallToolResult(content=[text], structured_content=document, is_error="error" in document)

    return call


def _in_process(name: str, arguments: Mapping[str, Any], *, writes: bool) -> dict[str, Any]:
    """Call a tool in a new process, and return the document of its result or of its error."""
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
            hint="The log of the server shows what it printed. `status` shows what was done.",
        )
        document = _error_document(error)

    process.join()
    return document


def _perform(writer: Connection, name: str, arguments: Mapping[str, Any], writes: bool) -> None:
    """Call a tool, and send the document of its result or of its error."""
    writer.send(_document(name, arguments, writes=writes))


def _document(name: str, arguments: Mapping[str, Any], *, writes: bool) -> dict[str, Any]:
    """Call a tool, and return the document of its result, shortened and with messages, or of its error."""
    tools = Tools(writes=writes)
    try:
        result = getattr(tools, TOOLS[name].method)(**arguments)
    except SlurmddpError as error:
        return _error_document(error)
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


def _error_document(error: SlurmddpError) -> dict[str, Any]:
    """Return the document of an error: what happened, what to do, and its exit code with its meaning."""
    code = EXIT_CODES.get(error.exit_code)
    return {"error": {**error_to_json(error), "meaning": code.text if code else ""}}
