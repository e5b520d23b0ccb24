"""Record a cell's output as messages that can show it again, for example on a reopened page.

Only visible output is kept: the last form of a display, the last end of a truncated text, and nothing that was cleared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddip.output.transcript import WIDGET

Message = dict[str, Any]
OVERHEAD = 200
"""Bytes that an entry takes in addition to its content."""
PIECE, MOST_TEXT = 4096, 1_000_000
"""Characters up to which short texts are joined into one string, as each takes 50 bytes more; and bytes up to which an
entry grows, as it is dropped as a whole."""


@dataclass
class _Entry:
    rank: int
    kind: str
    content: dict[str, Any]
    texts: list[str]
    """Texts of a stream in order; empty for other kinds."""
    size: int


class Recording:
    """The recorded output of one cell."""

    def __init__(self) -> None:
        self.size = 0
        """Approximate size in bytes."""
        self.most: int | None = None
        """Maximum size in bytes while the cell runs; None: no limit."""
        self.left_out = 0
        """Number of outputs dropped by `trim_recordings`."""
        self._entries: dict[int, _Entry] = {}
        self._count = 0
        self._updates: dict[tuple[int, str], int] = {}
        """Entry number of the last update, by rank and display ID."""
        self._floods: dict[tuple[int, str], list[int]] = {}
        """Entry numbers of the end of a truncated text, by rank and stream; a later end replaces them."""
        self._clears: dict[int, bool] = {}
        """Ranks whose output is cleared when the next output comes."""

    def add(self, rank: int, message: Message, captured: bool = False) -> None:
        """Add a message; `captured`: an Output widget captures it, so it does not clear the cell's output."""
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "clear_output":
            if not captured:
                self._clears[rank] = True
                if not content.get("wait", False):
                    self._clear(rank)
            return
        if not captured:
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
                self._append(rank, kind, content, [], _data_size(content.get("data")))

    def _add_text(self, rank: int, content: dict[str, Any]) -> None:
        stream, text = content["name"], content["text"]
        flood = self._floods.get((rank, stream))
        if content.get("line") is not None:
            for number in flood or ():
                self._drop(number)
            flood = self._floods[rank, stream] = []
        last = next(reversed(self._entries.values()), None)
        is_continued = content.get("line") is None and last is not None
        if (
            is_continued
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
        self._updates[key] = self._append(rank, "update_display_data", content, [], _data_size(content["data"]))

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
        """Drop the oldest outputs until the rest takes at most `most` bytes."""
        while self.size > most and self._entries:
            self._drop(next(iter(self._entries)))
            self.left_out += 1

    def messages(self) -> Iterator[tuple[int, Message]]:
        """Yield ranks and messages that show the output again, in order."""
        for entry in list(self._entries.values()):
            content = {**entry.content, "text": "".join(entry.texts)} if entry.texts else entry.content
            yield entry.rank, {"header": {"msg_type": entry.kind}, "content": content}


def trim_recordings(recordings: Sequence[Recording], most: int) -> None:
    """Drop the oldest outputs until `recordings`, sorted by age, take at most `most` bytes in total."""
    over = sum(recording.size for recording in recordings) - most
    for recording in recordings:
        if over <= 0:
            break
        before = recording.size
        recording.trim(max(0, before - over))
        over -= before - recording.size


def without_widget(data: dict[str, Any]) -> dict[str, Any]:
    """Return a bundle without its widget, which a reopened page does not know, if it has text."""
    return {mime: value for mime, value in data.items() if mime != WIDGET} if "text/plain" in data else data


def _data_size(value: Any) -> int:
    """Return the approximate size of a MIME bundle in bytes."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(_data_size(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_data_size(item) for item in value)
    return 8
