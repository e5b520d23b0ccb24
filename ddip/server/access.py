"""Who may use the tools: who has the token of the Jupyter server, as for anything else that the server does.

jupyter-server-mcp listens on a port of its own, where it asks nobody for a token. So each call of a tool of ddip's
asks, and no configuration leaves the question out.
"""

from __future__ import annotations

from fastmcp.exceptions import ToolError
from fastmcp.server.dependencies import get_http_request
from jupyter_server.serverapp import ServerApp

from ddip.server import tokens


def server() -> ServerApp:
    """The Jupyter server that this process is, for who has its token; raises ToolError for others."""
    if not ServerApp.initialized():
        raise ToolError("there is no Jupyter server in this process; ddip's tools are for jupyter-server-mcp")
    app = ServerApp.instance()
    try:
        request = get_http_request()
    except RuntimeError:
        raise ToolError(f"this call did not come by HTTP, and has no token; {tokens.HOW}") from None
    token = getattr(app.identity_provider, "token", "")
    refused = tokens.why_not(token, request.headers.get("authorization", ""), request.query_params.get("token", ""))
    if refused:
        raise ToolError(refused)
    return app
