"""Serve the tools over stdio with the official SDK of the Model Context Protocol."""

import json
from typing import Any

import anyio
import anyio.to_thread
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool as ListedTool,
    ToolAnnotations,
)
from pydantic import ValidationError

from fsdp_inspect.cli.assistant.run_folder import RunFolder
from fsdp_inspect.cli.assistant.tools import TOOLS, Tool
from fsdp_inspect.error_text import describe_validation_error, suggest
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.version import __version__

_INSTRUCTIONS = (
    "Recorded runs of PyTorch FSDP training. Begin with list_runs, then summary for a slow run or "
    "diagnose for a failed one. Every answer has `result` (the numbers; names end in _ns for "
    "nanoseconds, _bytes, or _ratio for 0 to 1) and `origin` (recorded, emulated, imported or "
    "predicted, with the methods). State the origin with a number, and do not state a cause or a "
    "gain with more confidence than the result does. `left_out` lists shortened parts: call the "
    "tool again with `part` to read one. define_metrics explains a key."
)


def serve_tools(folder: RunFolder) -> None:
    """Answer requests on stdin until it closes."""
    anyio.run(_serve, build_server(folder))


async def _serve(server: Server[Any]) -> None:
    async with stdio_server() as (requests, answers):
        await server.run(requests, answers, server.create_initialization_options())


def build_server(folder: RunFolder) -> Server[Any]:
    """A server of the tools for the runs of a folder."""

    async def list_tools(_: Any, __: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[_listed(tool) for tool in TOOLS.values()])

    async def call_tool(_: Any, params: CallToolRequestParams) -> CallToolResult:
        # In a thread, so that a long simulation keeps no other request waiting.
        given = params.arguments or {}
        return await anyio.to_thread.run_sync(answer_call, folder, params.name, given)

    return Server(
        "fsdp-inspect",
        version=__version__,
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _listed(tool: Tool) -> ListedTool:
    return ListedTool(
        name=tool.name,
        description=tool.description,
        input_schema=tool.arguments.model_json_schema(),
        annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False),
    )


def answer_call(folder: RunFolder, name: str, given: dict[str, Any]) -> CallToolResult:
    """The answer of a tool as JSON text, or an error with its three parts."""
    try:
        text = json.dumps(_answer(folder, name, given), allow_nan=False)
    except (FsdpInspectError, ValueError, TypeError, OSError) as error:
        return CallToolResult(content=[TextContent(type="text", text=str(error))], is_error=True)
    return CallToolResult(content=[TextContent(type="text", text=text)])


def _answer(folder: RunFolder, name: str, given: dict[str, Any]) -> dict[str, Any]:
    tool = TOOLS.get(name)
    if tool is None:
        raise ValueError(
            f"Unknown tool {name[:100]!r}. Expected a tool of this server. "
            f"{suggest(name, list(TOOLS), what='tools')}"
        )
    try:
        arguments = tool.arguments.model_validate(given)
    except ValidationError as error:
        legal = {"": list(tool.arguments.model_fields)}
        raise ValueError(
            f"Invalid arguments of {name}: {describe_validation_error(error, legal_keys=legal)} "
            f"Expected the arguments of the tool's schema. Change them and call {name} again."
        ) from error
    with folder.lending() as runs:
        return tool.answer(runs, arguments)
