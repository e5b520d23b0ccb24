"""Cells by ddip's own message: handed to IPython with little of ipykernel around.

ipykernel transforms a cell twice, looks at the signatures of IPython's methods, and cleans the answer for JSON. That is
for cells that await, and for kernels and clients of any kind; it takes as long as all that IPython does.
"""

from __future__ import annotations

import threading
from typing import Any

import zmq
from ipykernel.jsonutil import json_clean

from ddip.protocol import cell_messages
from ddip.protocol.cell_messages import CellReply, CellRequest
from ddip.rank.silent import SilentKernel


class _NoShellThread:
    """Stands where ipykernel 7 keeps its shell thread, which an ipyparallel engine has none of.

    ipykernel asks it for its parent when a cell awaits, even so: with None there, such a cell never ends
    (ipykernel 7.4, ipyparallel 9.2).
    """

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


class CellKernel(SilentKernel):
    """Takes such a cell; what runs it is the subclass's."""

    msg_types = [*SilentKernel.msg_types, cell_messages.REQUEST]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if getattr(self, "shell_channel_thread", None) is None:
            self.shell_channel_thread = _NoShellThread()
        self._transformers = self._transformers_now()

    def _transformers_now(self) -> list[Any]:
        """What may make anything of the text of a cell."""
        return [*self.shell.input_transformers_cleanup, *self.shell.input_transformers_post]

    async def ddip_cell_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Run the cell, and answer."""
        reply = await self.run_cell(parent["content"])
        message = self.session.msg(cell_messages.REPLY, reply, parent)
        stream.socket.send_multipart(self.session.serialize(message, ident))  # a ROUTER's does not block
        stream.flush(zmq.POLLIN)

    async def run_cell(self, request: CellRequest) -> CellReply:
        """Run the cell; never fails."""
        raise NotImplementedError

    async def have_run(self, code: str, silent: bool, history: bool) -> dict[str, Any]:
        """Have IPython run it: without an event loop, if it cannot await; returns the beginning of a `CellReply`."""
        if "await" in code or "async" in code or self._transformers != self._transformers_now():
            reply: dict[str, Any] = await super().do_execute(code, silent, history, {}, False)
            return reply
        self._forward_input()
        try:
            result = self.shell.run_cell(code, store_history=history, silent=silent)
        finally:
            self._restore_input()
        payload = self.shell.payload_manager.read_payload()
        self.shell.payload_manager.clear_payload()
        if result.success and not getattr(self.shell, "_last_traceback_during_displayhook", False):
            return {"status": "ok", "payload": json_clean(payload)}
        error = result.error_in_exec if result.error_before_exec is None else result.error_before_exec
        traceback = self.shell._last_traceback or []
        return {"status": "error", "ename": type(error).__name__, "evalue": str(error), "traceback": traceback}
