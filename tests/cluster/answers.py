"""Run a notebook whose cells ask the user; the metadata ``answers`` of a cell has the lines to type."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from queue import Empty
from typing import Any

import nbformat
from nbclient import NotebookClient

DRAIN_SECONDS = 0.3
"""Time for output before a prompt to arrive, since it travels on another channel than the prompt."""


class AnsweringClient(NotebookClient):
    """A client with stdin. It adds each prompt with its answer to the outputs of the cell, as JupyterLab does."""

    async def async_start_new_kernel_client(self) -> Any:
        """Start the client of a kernel that may ask."""
        client = await super().async_start_new_kernel_client()
        client.allow_stdin = True
        return client

    async def async_execute_cell(self, cell: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a cell, and answer what it asks."""
        assert self.kc is not None
        self.kc.allow_stdin = "answers" in cell.metadata
        task = asyncio.ensure_future(self._answer_prompts(cell, iter(cell.metadata.get("answers", ()))))
        try:
            return await super().async_execute_cell(cell, *args, **kwargs)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _answer_prompts(self, cell: Any, answers: Iterator[str]) -> None:
        assert self.kc is not None
        while True:
            try:
                request = await self.kc.get_stdin_msg(timeout=0.2)
            except Empty:
                continue
            await asyncio.sleep(DRAIN_SECONDS)
            answer = next(answers, "q")
            text = f"{request['content']['prompt']}{answer}\n"
            cell.outputs.append(nbformat.v4.new_output("stream", name="stdout", text=text))
            self.kc.input(answer)
