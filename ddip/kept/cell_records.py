"""Record what the keeper's cells show, so that a kernel that attaches later can show it below its own cell.

The keeper's session calls `CellRecords.add` with each message that it sends. Displays are kept in their last state:
an update replaces the former one, as on a page. Widgets are not recorded.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

CELLS = 50
"""Number of cells to remember."""
CHARACTERS = 1_000_000
"""Characters of text to keep per cell; the beginning of longer text is dropped."""
DISPLAYS = ("display_data", "execute_result")


@dataclass
class CellRecord:
    """The output of a cell."""

    number: int
    changed: float
    """Time of the last output, of ``time.monotonic``."""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    """Messages by ``kind`` and ``content``, as a page would keep them."""
    last: int = 0
    """Number of the last message (`order_of`)."""
    characters: int = 0
    is_dropped: bool = False
    """True if the beginning of the text was dropped."""
    clears_next: bool = False

    def add(self, kind: str, content: dict[str, Any]) -> None:
        """Add an output; `content` as in Jupyter's message of this `kind`."""
        if kind == "clear_output":
            self.clears_next = True
            if not content.get("wait"):
                self._clear()
            return
        if kind == "update_display_data":
            self._update(content)
            return
        if self.clears_next:
            self._clear()
        last = self.outputs[-1] if self.outputs else None
        if (
            kind == "stream"
            and last is not None
            and last["kind"] == kind
            and last["content"]["name"] == content["name"]
        ):
            last["content"]["text"] += content["text"]
        else:
            self.outputs.append({"kind": kind, "content": dict(content)})
        if kind == "stream":
            self._trim(len(content["text"]))

    def _clear(self) -> None:
        self.outputs.clear()
        self.characters, self.clears_next = 0, False

    def _update(self, content: dict[str, Any]) -> None:
        name = content.get("transient", {}).get("display_id")
        for output in self.outputs:
            if output["kind"] in DISPLAYS and output["content"].get("transient", {}).get("display_id") == name:
                output["content"] = dict(content)

    def _trim(self, added: int) -> None:
        """Drop the beginning of the text beyond the limit, once it is exceeded by half."""
        self.characters += added
        if self.characters < 1.5 * CHARACTERS:
            return
        for output in self.outputs:
            text = output["content"].get("text", "")
            cut = min(len(text), self.characters - CHARACTERS)
            if output["kind"] == "stream" and cut > 0:
                output["content"]["text"] = text[cut:]
                self.characters -= cut
                self.is_dropped = True
        self.outputs = [one for one in self.outputs if one["kind"] != "stream" or one["content"]["text"]]


def order_of(message: dict[str, Any]) -> int:
    """Return the number of a message among those of its session; Jupyter's message IDs end with it."""
    number = message["header"]["msg_id"].rpartition("_")[2]
    return int(number) if number.isdecimal() else 0


class CellRecords:
    """The records of the last cells, by the ID of the request that each answers; any thread may use it."""

    def __init__(self) -> None:
        self._records: dict[str, CellRecord] = {}
        self._lock = threading.Lock()

    def add(self, message: dict[str, Any], number: int) -> None:
        """Record a message; `number`: the number of its cell, used with its first message."""
        request = message["parent_header"].get("msg_id", "")
        with self._lock:
            record = self._records.get(request)
            if record is None:
                record = self._records[request] = CellRecord(number, 0.0)
                while len(self._records) > CELLS:
                    del self._records[next(iter(self._records))]
            record.changed, record.last = time.monotonic(), order_of(message)
            record.add(message["header"]["msg_type"], message["content"])

    def select(self, since: float, running: set[int]) -> dict[str, dict[str, Any]]:
        """Return by request the cells that have shown something after `since`, or are `running`.

        `since`: of ``time.monotonic``.
        """
        with self._lock:
            return {
                request: {
                    "number": record.number,
                    "is_dropped": record.is_dropped,
                    "last": record.last,
                    "outputs": [{**output, "content": dict(output["content"])} for output in record.outputs],
                }
                for request, record in self._records.items()
                if record.changed > since or record.number in running
            }
