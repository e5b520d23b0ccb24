"""Where the hosts of a group come from, when they are not named: looked for before anything is started."""

from __future__ import annotations

from ddip.group.placement import Request
from ddip.output.progress import Report


def found(request: Request, deadline: float, progress: Report) -> Request:
    """`request` with the hosts that its reach leads to; `deadline` on ``time.monotonic``.

    Raises BadInput or GroupError; nothing is left of what was begun then.
    """
    return request
