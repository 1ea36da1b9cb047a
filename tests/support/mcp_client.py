"""The server `slurmddp mcp` as an agent uses it: started by the client of the protocol's own package."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio
from mcp import Client, StdioServerParameters
from mcp_types import CallToolResult

Value = TypeVar("Value")


class Agent:
    """A client of the protocol that is connected to a server."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool, which must succeed, and return the JSON document of its result."""
        document = document_of(await self.client.call_tool(tool, arguments))
        assert "error" not in document, document["error"]
        return document

    async def refusal(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool, which must fail, and return the error in its result."""
        result = await self.client.call_tool(tool, arguments)
        assert result.is_error
        error: dict[str, Any] = document_of(result)["error"]
        return error


def document_of(result: CallToolResult) -> dict[str, Any]:
    """Return the JSON document of a tool's result, which holds it twice: as text and as an object."""
    (content,) = result.content
    document: dict[str, Any] = json.loads(content.text)
    assert result.structured_content == document and result.is_error == ("error" in document)
    return document


def with_server(
    use: Callable[[Agent], Awaitable[Value]],
    folder: Path,
    *arguments: str,
    mode: str = "auto",
    **environ: str,
) -> Value:
    """Start `slurmddp mcp` in a folder, let `use` talk to it, and end it.

    Args:
        use: gets the connected client.
        folder: the folder in which the server starts.
        arguments: the arguments of the command.
        mode: how the client agrees on a version of the protocol.
        environ: further variables of the server.
    """
    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "slurmddp", "mcp", *arguments],
        cwd=folder,
        env={**os.environ, **environ},
    )

    async def main() -> Value:
        async with Client(command, mode=mode) as client:
            return await use(Agent(client))

    return anyio.run(main)
