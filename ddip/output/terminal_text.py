"""Render text as a terminal does, with overwritten lines and colours; omit the middle of long text."""

from __future__ import annotations

import re

TOKEN = re.compile(r"\n|\r|\x08|\x1b\[[0-9;?]*[A-Za-z]|\x1b.|[^\n\r\x08\x1b]+", re.DOTALL)
"""A control character that moves the cursor, an escape sequence, or a run of plain text."""
MOVES = re.compile(r"\r(?!\n)|\x08|\x1b\[[0-9;?]*[A-HJKf]")
"""Control characters and sequences that move the cursor within text already written."""
STYLE = re.compile(r"\x1b\[([0-9;]*)m")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b.|\x08")
LIVE_ROWS = 31
"""Number of rows shown of long text while it grows."""
RESET = "\x1b[0m"


class Screen:
    """Text that is written as to a terminal; the middle of more than `limit` characters is omitted.

    The head keeps the first rows, the tail the last ones, where the cursor is.
    """

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head: list[str] = []
        self._tail: list[str] = [""]
        self._size = 0
        """Characters of the tail."""
        self._is_complete = True
        """True while all text is in the tail and nothing is omitted."""
        self._rows_up = 0
        """Rows from the last one up to the cursor."""
        self._column: int | None = None
        """Column of the cursor; None: at the end of its row."""
        self._style = ""
        """Escape sequences in force at the cursor."""
        self.skipped = 0
        """Number of omitted lines, here or on the rank."""
        self.cut = 0
        """Number of characters omitted from lines that are shown in part."""
        self._head_cut = 0
        """Characters missing at the end of the head's last row."""
        self._tail_continues_row = False
        """True if the first row of the tail is the rest of the head's last row."""

    def write(self, text: str) -> None:
        """Write `text` at the cursor."""
        if self._rows_up or self._column is not None or MOVES.search(text):
            for token in TOKEN.findall(text):
                self._apply_token(token)
            self._size = sum(map(len, self._tail)) + len(self._tail) - 1
        else:
            first, *rest = text.replace("\r\n", "\n").split("\n")
            self._tail[-1] += first
            self._tail += rest
            self._style = _style_after(self._style, text)
            self._size += len(text)
        if self._size - text.endswith("\n") > (2 * self._half if self._is_complete else self._half + self._half // 8):
            self._trim_tail()

    def jump(self, line: int, text: str, cut: int = 0) -> None:
        """Drop the text from `line` on, counted from 0, and write `text`, which follows a part that the rank omitted.

        `cut` is the number of omitted characters at the start of `line`.
        """
        if self._is_complete and line < len(self._tail) and not cut:  # `text` joins what is here without a gap
            self._tail[line:] = [""]
            self._size = sum(map(len, self._tail)) + len(self._tail) - 1
            self._rows_up, self._column = 0, None
            self.write(text)
            return
        if self._is_complete:
            self._split_head()
        self.skipped, self.cut = max(0, line - len(self._head)), self._head_cut + cut
        self._tail_continues_row = False
        self._tail, self._size, self._rows_up, self._column = [""], 0, 0, None
        self.write(text)

    @property
    def unfinished(self) -> bool:
        """True if the cursor is in a line that is not finished."""
        return bool(self._rows_up or strip_escapes(self._tail[-1]).strip())

    @property
    def text(self) -> str:
        """All rows with colours, and a line that counts the omitted ones."""
        return "\n".join([*self._head_rows, *self._tail])

    @property
    def _head_rows(self) -> list[str]:
        return [*self._head, self.left_out] if self.left_out else self._head

    @property
    def left_out(self) -> str:
        """Line that counts the omitted lines and characters; empty if there are none."""
        counts = {"line": self.skipped, "character": self.cut}
        parts = [_count_text(number, name) for name, number in counts.items() if number]
        return f"… {' and '.join(parts)} left out …" if parts else ""

    def live_text(self, most: int) -> str:
        """Return the text while it grows; only the last rows if it exceeds `most` characters."""
        if not self.skipped and self._size < most:
            return self.text
        above = self.skipped + len(self._head) + max(0, len(self._tail) - LIVE_ROWS)
        return "\n".join([f"… {_count_text(above, 'line')} above …", *self._tail[-LIVE_ROWS:]])

    @property
    def end_text(self) -> str:
        """The text after the omitted part."""
        return "\n".join(self._tail)

    def take(self) -> str:
        """Remove and return all finished lines, each with its newline."""
        whole = self._tail[: len(self._tail) - 1 - self._rows_up]
        if not whole:
            return ""
        self._tail = self._tail[len(whole) :]
        self._size = sum(map(len, self._tail))
        whole = [*self._head_rows, *whole]
        self._head, self._is_complete, self.skipped, self.cut = [], True, 0, 0
        self._head_cut, self._tail_continues_row = 0, False
        return "".join(f"{row}\n" for row in whole)

    # -- the cursor

    def _apply_token(self, token: str) -> None:
        match token[0]:
            case "\n":
                if self._rows_up:
                    self._rows_up -= 1
                else:
                    self._tail.append("")
                self._column = 0 if self._tail[-1 - self._rows_up] else None
            case "\r":
                self._column = 0
            case "\b":
                self._column = max(0, self._cursor_column() - 1)
            case "\x1b":
                self._apply_escape(token)
            case _:
                self._overwrite(token)

    def _cursor_column(self) -> int:
        return len(strip_escapes(self._tail[-1 - self._rows_up])) if self._column is None else self._column

    def _apply_escape(self, token: str) -> None:
        digits = re.sub(r"\D", "", token)
        kind, count = token[-1], int(digits or 1)
        if kind == "m":
            self._style = _style_after(self._style, token)
            if self._column is None:
                self._tail[-1 - self._rows_up] += token
        elif kind in "ABEF":
            self._go_to_row(self._rows_up + (count if kind in "AF" else -count), keep_column=kind in "AB")
        elif kind in "CDG":
            column = self._cursor_column()
            self._column = max(0, {"C": column + count, "D": column - count, "G": count - 1}[kind])
        elif kind == "K":
            self._erase_row(digits)
        elif kind == "J" and digits in ("", "0"):
            self._erase_row("")
            if self._rows_up:
                del self._tail[len(self._tail) - self._rows_up :]
                self._rows_up = 0

    def _go_to_row(self, up: int, keep_column: bool) -> None:
        """Move the cursor to the row `up` rows above the last one."""
        self._column = self._cursor_column() if keep_column else 0
        self._rows_up = min(len(self._tail) - 1, max(0, up))

    def _erase_row(self, part: str) -> None:
        """Erase the row after the cursor; with `part` ``1`` before the cursor, with ``2`` all of it."""
        row, column = -1 - self._rows_up, self._cursor_column()
        cells = _styled_cells(self._tail[row])
        if part == "2":
            cells = []
        elif part == "1":
            cells = [("", " ")] * min(len(cells), column) + cells[column:]
        else:
            cells = cells[:column]
        self._column = column
        self._tail[row] = _row_text(cells)

    def _overwrite(self, run: str) -> None:
        row = -1 - self._rows_up
        if self._column is None:
            self._tail[row] += run
            return
        cells = _styled_cells(self._tail[row])
        cells += [("", " ")] * (self._column - len(cells))
        cells[self._column : self._column + len(run)] = [(self._style, character) for character in run]
        self._column += len(run)
        self._tail[row] = _row_text(cells)

    # -- floods

    def _split_head(self) -> None:
        """Move the first lines to the head, and as much of a long line as there is room for."""
        self._is_complete = False
        size = count = 0
        last = len(self._tail) - 1 - self._rows_up
        while count < last and size + len(self._tail[count]) <= self._half:
            size += len(self._tail[count]) + 1
            count += 1
        self._head, self._tail = self._tail[:count], self._tail[count:]
        room = self._half - size
        if room > 0 and len(self._tail[0]) > self._half // 2 and not (count == last and self._is_cursor_within):
            row = self._tail[0]
            self._head.append(row[:room])
            self._tail[0] = row[room:]
            self._head_cut, self._tail_continues_row = len(row) - room, True
            size += room
        self._size -= size

    def _trim_tail(self) -> None:
        """Omit the first rows of the tail until it fits; count them."""
        if self._is_complete:
            self._split_head()
        count = 0
        last = len(self._tail) - 1 - self._rows_up
        while count < last and self._size > self._half:
            row = self._tail[count]
            over = self._size - self._half
            if len(row) > self._half // 2 and over < len(row):
                break
            self._size -= len(row) + 1
            if self._tail_continues_row:
                self._tail_continues_row = False
                self.cut += len(row)
            else:
                self.skipped += 1
            count += 1
        del self._tail[:count]
        over = self._size - self._half
        if over <= 0:
            return
        if len(self._tail[0]) >= over and not (len(self._tail) == 1 and self._is_cursor_within):
            self.cut += over
            self._tail[0] = self._tail[0][over:]
            self._size -= over
        elif self._size > 2 * self._half:  # the cursor is in a long line, which may still be overwritten
            self._tail = [row[-self._half :] for row in self._tail]
            self._size = sum(map(len, self._tail))

    @property
    def _is_cursor_within(self) -> bool:
        """True if the cursor is not at the end of the text."""
        return bool(self._rows_up) or self._column is not None


def moves_cursor(text: str) -> bool:
    """Return True if `text` moves the cursor to overwrite earlier text, as a progress bar does."""
    return MOVES.search(text) is not None


def _count_text(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def strip_escapes(text: str) -> str:
    """Return `text` without escape sequences."""
    return ESCAPE.sub("", text)


def last_lines(text: str, count: int) -> str:
    """Return the last `count` lines of `text` as a terminal shows them, without colours.

    Blank lines at the end do not count.
    """
    screen = Screen(2 * len(text))
    screen.write(text)
    return "\n".join(strip_escapes(screen.text).rstrip().splitlines()[-count:])


def _style_after(style: str, text: str) -> str:
    """Return the escape sequences in force after `text`, if those of `style` are in force before it."""
    for found in STYLE.finditer(text):
        style = "" if found[1] in ("", "0") else style + found[0]
    return style


def _styled_cells(row: str) -> list[tuple[str, str]]:
    """Return each character of `row` with the escape sequences in force there."""
    cells: list[tuple[str, str]] = []
    style = ""
    for token in TOKEN.findall(row):
        if STYLE.fullmatch(token):
            style = _style_after(style, token)
        else:
            cells += [(style, character) for character in token]
    return cells


def _row_text(cells: list[tuple[str, str]]) -> str:
    parts: list[str] = []
    style = ""
    for now, character in cells:
        if now != style:
            parts.append((RESET if style else "") + now)
            style = now
        parts.append(character)
    return "".join(parts) + (RESET if style else "")
