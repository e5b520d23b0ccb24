"""What a cell has shown, kept as the messages that show the same again: on a page that was opened anew, or once more.

Only what is still to be seen is kept: of a display the last form, of a flood the last end, of what
was cleared nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddip.output.transcript import WIDGET

Message = dict[str, Any]
OVERHEAD = 200
"""Bytes that an entry takes besides what it says."""
PIECE, MOST_TEXT = 4096, 1_000_000
"""Short texts are kept together, for each takes 50 bytes besides; what an entry has is dropped all at once."""


@dataclass
class _Entry:
    rank: int
    kind: str
    content: dict[str, Any]
    texts: list[str]
    """Of a stream: what was written, one after the other."""
    size: int


class Recording:
    """Of one cell."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes, about."""
        self.most: int | None = None
        """Bytes that it may take while the cell runs."""
        self.left_out = 0
        """Outputs that were dropped for lack of room, the oldest first."""
        self._entries: dict[int, _Entry] = {}
        self._count = 0
        self._updates: dict[tuple[int, str], int] = {}
        """The last update of each display of a rank."""
        self._floods: dict[tuple[int, str], list[int]] = {}
        """Of each stream of a rank: the end of its flood."""
        self._clears: dict[int, bool] = {}
        """Ranks that clear what they have shown when something new comes."""

    def add(self, rank: int, message: Message, captured: bool = False) -> None:
        """One more message; `captured`: an Output widget has it, and only that is cleared by it."""
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "clear_output":
            if not captured:
                self._clears[rank] = True
                if not content.get("wait", False):
                    self._clear(rank)
            return
        self._clear(rank)
        self._keep(rank, kind, content)
        if self.most is not None:
            self.trim(self.most)

    def _keep(self, rank: int, kind: str, content: dict[str, Any]) -> None:
        match kind:
            case "stream":
                self._add_text(rank, content)
            case "update_display_data":
                self._update(rank, content)
            case _:
                self._append(rank, kind, content, [], _size(content.get("data")))

    def _add_text(self, rank: int, content: dict[str, Any]) -> None:
        stream, text = content["name"], content["text"]
        flood = self._floods.get((rank, stream))
        if content.get("line") is not None:
            for number in flood or ():
                self._drop(number)
            flood = self._floods[rank, stream] = []
        last = next(reversed(self._entries.values()), None)
        goes_on = content.get("line") is None and last is not None
        if (
            goes_on
            and last is not None
            and (last.rank, last.kind, last.content.get("name")) == (rank, "stream", stream)
            and last.size < MOST_TEXT
        ):
            if len(last.texts[-1]) < PIECE:
                last.texts[-1] += text
            else:
                last.texts.append(text)
            last.size += len(text)
            self.size += len(text)
            return
        number = self._append(rank, "stream", content, [text], len(text))
        if flood is not None:
            flood.append(number)

    def _update(self, rank: int, content: dict[str, Any]) -> None:
        key = rank, content["transient"]["display_id"]
        if key in self._updates:
            self._drop(self._updates[key])
        self._updates[key] = self._append(rank, "update_display_data", content, [], _size(content["data"]))

    def _append(self, rank: int, kind: str, content: dict[str, Any], texts: list[str], size: int) -> int:
        self._count += 1
        self._entries[self._count] = _Entry(rank, kind, content, texts, size + OVERHEAD)
        self.size += size + OVERHEAD
        return self._count

    def _drop(self, number: int) -> None:
        entry = self._entries.pop(number, None)
        if entry is not None:
            self.size -= entry.size

    def _clear(self, rank: int) -> None:
        if self._clears.pop(rank, False):
            for number in [number for number, entry in self._entries.items() if entry.rank == rank]:
                self._drop(number)

    def trim(self, most: int) -> None:
        """Drop the oldest outputs until it takes no more than `most` bytes."""
        while self.size > most and self._entries:
            self._drop(next(iter(self._entries)))
            self.left_out += 1

    def messages(self) -> Iterator[tuple[int, Message]]:
        """What shows it again, by rank, in order."""
        for entry in list(self._entries.values()):
            content = {**entry.content, "text": "".join(entry.texts)} if entry.texts else entry.content
            yield entry.rank, {"header": {"msg_type": entry.kind}, "content": content}


def trim(recordings: Sequence[Recording], most: int) -> None:
    """Have `recordings`, the oldest first, take no more than `most` bytes together; the oldest give way."""
    over = sum(recording.size for recording in recordings) - most
    for recording in recordings:
        if over <= 0:
            break
        before = recording.size
        recording.trim(max(0, before - over))
        over -= before - recording.size


def without_widget(data: dict[str, Any]) -> dict[str, Any]:
    """As text: a page that was opened anew does not know the widget any more."""
    return {mime: value for mime, value in data.items() if mime != WIDGET} if "text/plain" in data else data


def _size(value: Any) -> int:
    """Bytes of a MIME bundle, about."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(_size(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_size(item) for item in value)
    return 8
