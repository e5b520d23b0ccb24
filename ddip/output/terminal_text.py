"""Text as a terminal would show it: overwritten lines, colours, and of a flood only the beginning and the end."""

from __future__ import annotations

import re

TOKEN = re.compile(r"\n|\r|\x08|\x1b\[[0-9;?]*[A-Za-z]|\x1b.|[^\n\r\x08\x1b]+", re.DOTALL)
"""A character that moves the cursor, an escape sequence, or a run of plain text."""
MOVES = re.compile(r"\r(?!\n)|\x08|\x1b\[[0-9;?]*[A-HJKf]")
"""What makes more of a text than lines, one after the other."""
STYLE = re.compile(r"\x1b\[([0-9;]*)m")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b.|\x08")
LIVE_ROWS = 31
"""Of a long text, while it grows."""
RESET = "\x1b[0m"


class Screen:
    """Lines that grow; characters that move the cursor are obeyed. Above `limit` characters the middle is left out."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head: list[str] = []
        self._tail: list[str] = [""]
        self._size = 0
        """Of the tail, in characters."""
        self._whole = True
        self._up = 0
        """Rows from the cursor's down to the last."""
        self._column: int | None = None
        """Of the cursor; None: at the end of its row."""
        self._style = ""
        self.skipped = 0
        """Lines left out, here or on the rank."""
        self.cut = 0
        """Characters left out of lines that are shown in part."""
        self._rest = 0
        """Characters of the last row of the head that are not in it."""
        self._goes_on = False
        """Is the first row of the tail the rest of that one?"""

    def write(self, text: str) -> None:
        """Show more."""
        if self._up or self._column is not None or MOVES.search(text):
            for token in TOKEN.findall(text):
                self._obey(token)
            self._size = sum(map(len, self._tail)) + len(self._tail) - 1
        else:
            first, *rest = text.replace("\r\n", "\n").split("\n")
            self._tail[-1] += first
            self._tail += rest
            self._style = _style_after(self._style, text)
            self._size += len(text)
        if self._size - text.endswith("\n") > (2 * self._half if self._whole else self._half + self._half // 8):
            self._leave_out()

    def jump(self, line: int, text: str, cut: int = 0) -> None:
        """Show `text`, which begins at `line` from 0 after `cut` characters that are left out, in place of all but the
        beginning."""
        if self._whole and line < len(self._tail) and not cut:  # nothing is missing between
            self._tail[line:] = [""]
            self._size = sum(map(len, self._tail)) + len(self._tail) - 1
            self._up, self._column = 0, None
            self.write(text)
            return
        if self._whole:
            self._divide()
        self.skipped, self.cut = max(0, line - len(self._head)), self._rest + cut
        self._goes_on = False
        self._tail, self._size, self._up, self._column = [""], 0, 0, None
        self.write(text)

    @property
    def unfinished(self) -> bool:
        """Is the cursor within a line that something more will be written into?"""
        return bool(self._up or plain(self._tail[-1]).strip())

    @property
    def text(self) -> str:
        """All lines, colours included."""
        return "\n".join([*self._beginning, *self._tail])

    @property
    def _beginning(self) -> list[str]:
        return [*self._head, self.left_out] if self.left_out else self._head

    @property
    def left_out(self) -> str:
        """What stands where something is missing; empty where nothing is."""
        counts = {"line": self.skipped, "character": self.cut}
        parts = [_count(number, name) for name, number in counts.items() if number]
        return f"… {' and '.join(parts)} left out …" if parts else ""

    def live_text(self, most: int) -> str:
        """The same while it grows; above `most` characters the last rows of it."""
        if not self.skipped and self._size < most:
            return self.text
        above = self.skipped + len(self._head) + max(0, len(self._tail) - LIVE_ROWS)
        return "\n".join([f"… {_count(above, 'line')} above …", *self._tail[-LIVE_ROWS:]])

    @property
    def end_text(self) -> str:
        """What comes after what was left out."""
        return "\n".join(self._tail)

    def take(self) -> str:
        """Take away all lines that are finished, each with its end."""
        whole = self._tail[: len(self._tail) - 1 - self._up]
        if not whole:
            return ""
        self._tail = self._tail[len(whole) :]
        self._size = sum(map(len, self._tail))
        whole = [*self._beginning, *whole]
        self._head, self._whole, self.skipped, self.cut, self._rest, self._goes_on = [], True, 0, 0, 0, False
        return "".join(f"{row}\n" for row in whole)

    # -- the cursor

    def _obey(self, token: str) -> None:
        match token[0]:
            case "\n":
                if self._up:
                    self._up -= 1
                else:
                    self._tail.append("")
                self._column = 0 if self._tail[-1 - self._up] else None
            case "\r":
                self._column = 0
            case "\b":
                self._column = max(0, self._where() - 1)
            case "\x1b":
                self._escape(token)
            case _:
                self._put(token)

    def _where(self) -> int:
        return len(plain(self._tail[-1 - self._up])) if self._column is None else self._column

    def _escape(self, token: str) -> None:
        digits = re.sub(r"\D", "", token)
        kind, count = token[-1], int(digits or 1)
        if kind == "m":
            self._style = _style_after(self._style, token)
            if self._column is None:
                self._tail[-1 - self._up] += token
        elif kind in "ABEF":
            self._go_to_row(self._up + (count if kind in "AF" else -count), keep_column=kind in "AB")
        elif kind in "CDG":
            self._column = max(0, {"C": self._where() + count, "D": self._where() - count, "G": count - 1}[kind])
        elif kind == "K":
            self._erase_row(digits)
        elif kind == "J" and digits in ("", "0"):
            self._erase_row("")
            if self._up:
                del self._tail[len(self._tail) - self._up :]
                self._up = 0

    def _go_to_row(self, up: int, keep_column: bool) -> None:
        """So many rows up from the last."""
        self._column = self._where() if keep_column else 0
        self._up = min(len(self._tail) - 1, max(0, up))

    def _erase_row(self, part: str) -> None:
        """What is after the cursor; with ``1`` what is before it, with ``2`` all."""
        row, column = -1 - self._up, self._where()
        cells = _cells(self._tail[row])
        if part == "2":
            cells = []
        elif part == "1":
            cells = [("", " ")] * min(len(cells), column) + cells[column:]
        else:
            cells = cells[:column]
        self._column = column
        self._tail[row] = _row(cells)

    def _put(self, run: str) -> None:
        row = -1 - self._up
        if self._column is None:
            self._tail[row] += run
            return
        cells = _cells(self._tail[row])
        cells += [("", " ")] * (self._column - len(cells))
        cells[self._column : self._column + len(run)] = [(self._style, character) for character in run]
        self._column += len(run)
        self._tail[row] = _row(cells)

    # -- floods

    def _divide(self) -> None:
        """Keep the first lines for ever, and of a long one as much as there is room for."""
        self._whole = False
        size = count = 0
        last = len(self._tail) - 1 - self._up
        while count < last and size + len(self._tail[count]) <= self._half:
            size += len(self._tail[count]) + 1
            count += 1
        self._head, self._tail = self._tail[:count], self._tail[count:]
        room = self._half - size
        if room > 0 and len(self._tail[0]) > self._half // 2 and not (count == last and self._overwrites):
            row = self._tail[0]
            self._head.append(row[:room])
            self._tail[0] = row[room:]
            self._rest, self._goes_on = len(row) - room, True
            size += room
        self._size -= size

    def _leave_out(self) -> None:
        if self._whole:
            self._divide()
        count = 0
        last = len(self._tail) - 1 - self._up
        while count < last and self._size > self._half:
            row = self._tail[count]
            over = self._size - self._half
            if len(row) > self._half // 2 and over < len(row):
                break
            self._size -= len(row) + 1
            if self._goes_on:
                self._goes_on = False
                self.cut += len(row)
            else:
                self.skipped += 1
            count += 1
        del self._tail[:count]
        over = self._size - self._half
        if over <= 0:
            return
        if len(self._tail[0]) >= over and not (len(self._tail) == 1 and self._overwrites):
            self.cut += over
            self._tail[0] = self._tail[0][over:]
            self._size -= over
        elif self._size > 2 * self._half:  # a line that was overwritten again and again
            self._tail = [row[-self._half :] for row in self._tail]
            self._size = sum(map(len, self._tail))

    @property
    def _overwrites(self) -> bool:
        """Is the cursor within what is there?"""
        return bool(self._up) or self._column is not None


def moves(text: str) -> bool:
    """Does `text` overwrite what was written before, as a progress bar does?"""
    return MOVES.search(text) is not None


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def plain(text: str) -> str:
    """`text` without colours."""
    return ESCAPE.sub("", text)


def _style_after(style: str, text: str) -> str:
    """The escape sequences that are in force at the end of `text`."""
    for found in STYLE.finditer(text):
        style = "" if found[1] in ("", "0") else style + found[0]
    return style


def _cells(row: str) -> list[tuple[str, str]]:
    """Each character of `row`, with the escape sequences in force there."""
    cells: list[tuple[str, str]] = []
    style = ""
    for token in TOKEN.findall(row):
        if STYLE.fullmatch(token):
            style = _style_after(style, token)
        else:
            cells += [(style, character) for character in token]
    return cells


def _row(cells: list[tuple[str, str]]) -> str:
    parts: list[str] = []
    style = ""
    for now, character in cells:
        if now != style:
            parts.append((RESET if style else "") + now)
            style = now
        parts.append(character)
    return "".join(parts) + (RESET if style else "")
