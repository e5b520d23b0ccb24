"""Access control for the tools: a call needs the Jupyter server's token, like any other request to the server.

jupyter-server-mcp listens on a separate port, where it does not ask for a token. So each ddip tool checks the token
itself, and no setting turns the check off.
"""

from __future__ import annotations

from fastmcp.exceptions import ToolError
from fastmcp.server.dependencies import get_http_request
from jupyter_server.serverapp import ServerApp

from ddip.server import tokens


def authorized_server() -> ServerApp:
    """Return this process's Jupyter server if the current request has its token; raise ToolError if not."""
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
