"""Check that a request has the Jupyter server's token."""

from __future__ import annotations

import hmac
import re

HEADER = re.compile(r"(?:token|bearer)\s+(\S+)\s*", re.IGNORECASE)
"""The ``Authorization`` header in the forms that the Jupyter server accepts."""
HOW = "send the header 'Authorization: token ...', or add ?token=... to the URL; `jupyter server list` shows the token"


def why_not(token: str, header: str, typed: str) -> str:
    """Return the reason why a server with this `token` refuses a request, empty if it accepts it.

    `header`: the request's ``Authorization`` header; `typed`: the token in its URL.
    """
    if not token:
        return (
            "this Jupyter server has no token, and without one ddip's tools are closed to all: start it with one, "
            "such as JUPYTER_TOKEN=... in its environment"
        )
    found = HEADER.fullmatch(header)
    given = typed or (found[1] if found else "")
    if not given:
        return f"this needs the token of the Jupyter server: {HOW}"
    if not hmac.compare_digest(given.encode(), token.encode()):
        return f"this is not the token of the Jupyter server; {HOW}"
    return ""
