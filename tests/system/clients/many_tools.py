"""A server of the Model Context Protocol with 200 tools: JSON-RPC, a message a line, on standard input and output."""

from __future__ import annotations

import json
import sys

TOOLS = [
    {
        "name": f"tool_{index}_{'x' * 40}",
        "description": "Does nothing.",
        "inputSchema": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
    for index in range(200)
]

for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue  # a notification
    match request["method"]:
        case "initialize":
            version = request["params"]["protocolVersion"]
            server = {"name": "many", "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
        case "tools/list":
            result = {"tools": TOOLS}
        case "tools/call":
            result = {"content": [{"type": "text", "text": f"{request['params']['name']} was called"}]}
        case _:
            result = {}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
