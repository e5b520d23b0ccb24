"""A kernel that sends nothing about a cell of the notebook but its answer, and what somebody sees.

ipykernel sends everybody that a request has begun, its code, and that it has ended: three messages of five. That a cell
has begun nobody asks; that nothing more follows is in the answer of a cell that has shown nothing. Of one that has, the
last message says so, since answer and output travel by different sockets.
"""

from __future__ import annotations

import threading
from typing import Any

from ipyparallel.engine.kernel import IPythonParallelKernel

from ddip.protocol import cell_messages
from ddip.rank.streams import RankStream


class SilentKernel(IPythonParallelKernel):  # type: ignore[misc]
    """For requests of ddip's; whatever else ipyparallel's clients send is handled as ever."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sent = self._sent_before = 0
        """Messages that went to everybody, now and before the cell."""
        self._silent = ""
        """Id of the last cell that has shown nothing."""
        thread = self.iopub_socket
        self._send_to_all, thread.send_multipart = thread.send_multipart, self._count

    def _count(self, *args: Any, **kwargs: Any) -> None:
        self._sent += 1
        if RankStream.flushing and threading.current_thread() is self.iopub_socket.thread:
            self.iopub_socket.socket.send_multipart(*args, **kwargs)  # ipykernel would have it wait for the next turn
        else:
            self._send_to_all(*args, **kwargs)

    def listen(self) -> None:
        """A cell begins."""
        self._sent_before = self._sent

    def speak(self) -> None:
        """The answer will not say that nothing was shown: the last message must."""
        self._silent = ""

    def was_silent(self, msg_id: str) -> bool:
        """Has the cell with this id, which ends now, shown nothing?"""
        silent = self._sent == self._sent_before and RankStream.is_quiet()
        self._silent = msg_id if silent else ""
        return silent

    def _publish_status(self, status: str, channel: str, parent: dict[str, Any] | None = None) -> None:
        request = parent or self.get_parent(channel)
        unasked = _is_cell(request) and (status == "busy" or request["header"]["msg_id"] == self._silent)
        if not unasked and not _is_call(request):
            super()._publish_status(status, channel, parent)


def _kind(request: dict[str, Any]) -> str:
    return str(request.get("header", {}).get("msg_type", ""))


def _is_cell(request: dict[str, Any]) -> bool:
    return _kind(request) == cell_messages.REQUEST


def _is_call(request: dict[str, Any]) -> bool:
    """Only its answer is of use."""
    return "doing" in request.get("metadata", {}) or _kind(request) in ("ddip_request", "ddip_interrupt")
