"""What a running cell prints and displays on the ranks -> the notebook, by rank."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import clear_output, publish_display_data

from ddip.errors import ranks_text
from ddip.rank.place import Place, Stack

Message = dict[str, Any]
Bundle = dict[str, Any]


class CellOutput:
    """Shows the messages of one cell, from the ranks in `see`; unless that is rank 0 alone, each line says its rank.

    Call it on the notebook's main thread only: IPython routes what is written there to the cell that waits.
    """

    def __init__(self, see: Sequence[int], *, quiet: bool = False) -> None:
        self._see = set(see)
        self._labelled = self._see != {0}
        self._kept: dict[int, list[Message]] | None = {rank: [] for rank in sorted(self._see)} if quiet else None
        self._unfinished: dict[tuple[int, str], str] = {}

    def receive(self, rank: int, message: Message) -> None:
        """Show one message, or keep it for the end."""
        if rank not in self._see:
            return
        if self._kept is not None:
            self._kept[rank].append(message)
        else:
            self._show(rank, message)

    def finish(self) -> None:
        """The cell has ended on every rank: show what was kept, and lines without an end."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            for rank, messages in kept.items():
                for message in messages:
                    self._show(rank, message)
                self._end_lines(rank)
        for rank in sorted(self._see):
            self._end_lines(rank)
        flush()

    def _show(self, rank: int, message: Message) -> None:
        content = message["content"]
        match message["header"]["msg_type"]:
            case "stream":
                self._write(rank, content["name"], content["text"])
            case "execute_result":
                self._end_lines(rank)
                label = f"Out[{rank}:{content['execution_count']}]:"
                self._publish(_labelled(label, content["data"]), content)
            case "display_data" | "update_display_data" as kind:
                self._end_lines(rank)
                if self._labelled and kind == "display_data":
                    _write(sys.stdout, f"[rank {rank}]\n")
                self._publish(content["data"], content, update=kind == "update_display_data")
            case "clear_output" if not self._labelled:
                clear_output(wait=content.get("wait", False))

    def _publish(self, data: Bundle, content: dict[str, Any], update: bool = False) -> None:
        flush()
        publish_display_data(data, content.get("metadata"), transient=content.get("transient"), update=update)

    def _write(self, rank: int, stream: str, text: str) -> None:
        out = sys.stderr if stream == "stderr" else sys.stdout
        if not self._labelled:
            _write(out, text)
            return
        *lines, rest = (self._unfinished.pop((rank, stream), "") + text).split("\n")
        if rest:
            self._unfinished[rank, stream] = rest
        _write(out, "".join(f"[rank {rank}] {line}\n" for line in lines))

    def _end_lines(self, rank: int) -> None:
        for stream in ("stdout", "stderr"):
            if (rank, stream) in self._unfinished:
                self._write(rank, stream, "\n")


def _write(out: Any, text: str) -> None:
    if text:
        out.write(text)


def tell(text: str) -> None:
    """Say something of ddip's own while a cell runs."""
    _write(sys.stderr, f"ddip: {text}\n")
    flush()


def flush() -> None:
    """Send what was written to the notebook's page."""
    sys.stdout.flush()
    sys.stderr.flush()


def _labelled(label: str, data: Bundle) -> Bundle:
    """`data` with ``Out[rank:n]:`` before its text; rich forms stay as they are."""
    text = data.get("text/plain", "")
    return {**data, "text/plain": f"{label} {text}" if "\n" not in text else f"{label}\n{text}"}


class Progress:
    """One line that changes while something is under way: in place in a notebook and in a terminal."""

    def __init__(self) -> None:
        shell = get_ipython()
        self._page = getattr(shell, "kernel", None) is not None
        self._id = f"ddip-{id(self)}"
        self._last = ""

    def __call__(self, text: str) -> None:
        """Show `text` instead of what was shown before."""
        if text == self._last:
            return
        if self._page:
            bundle = {"text/plain": text}
            publish_display_data(bundle, transient={"display_id": self._id}, update=bool(self._last))
        elif sys.stderr.isatty():
            sys.stderr.write(f"\r{text:<{len(self._last)}}")
            sys.stderr.flush()
        self._last = text

    def end(self, text: str) -> None:
        """Leave `text` as the last word."""
        if self._page:
            self(text)
            return
        if self._last and sys.stderr.isatty():
            sys.stderr.write("\r" + " " * len(self._last) + "\r")
            sys.stderr.flush()
        if text:
            print(text)


def places_text(places: Mapping[int, Place | None]) -> str:
    """Where each rank is, one line each, ranks at the same place together; None: it does not answer."""
    together: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        text = "no answer" if place is None else f"{place}: {place.source}" if place.source else str(place)
        together.setdefault(text, []).append(rank)
    return "\n".join(f"  {ranks_text(ranks)}: {text}" for text, ranks in together.items())


def stack_of(answer: dict[str, Any]) -> Stack:
    """What a rank tells of its threads, as a `Stack`."""
    return Stack(**{**answer, "place": Place(**answer["place"])})


def stacks_text(stacks: Mapping[int, Stack | None]) -> str:
    """All threads of each rank, ranks with the same stacks together."""
    together: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        if stack is None:
            text = "  no answer"
        else:
            text = "\n".join(f"  {name}:\n{_indented(frames)}" for name, frames in stack.threads.items())
        together.setdefault(text, []).append(rank)
    return "\n".join(f"{ranks_text(ranks)}\n{text}" for text, ranks in together.items())


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def size_text(size: float | None) -> str:
    """Bytes for people: ``1.5 GB``; empty for None."""
    if size is None:
        return ""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


@dataclass(frozen=True)
class RankInfo:
    """One rank, as ``%makedip -i`` shows it; sizes in bytes, seconds of the last cell."""

    rank: int
    host: str
    pid: int
    device: str
    memory: int | None
    gpu_allocated: int | None
    gpu_reserved: int | None
    gpu_total: int | None
    state: str
    seconds: float | None


def info_table(infos: Sequence[RankInfo]) -> str:
    """The table of ``%makedip -i``; the GPU column is there when a rank has one."""
    head = ["rank", "host", "pid", "device", "memory", "GPU memory allocated / reserved / total", "state", "last cell"]
    rows = [
        [
            str(info.rank),
            info.host,
            str(info.pid),
            info.device,
            size_text(info.memory),
            " / ".join(
                size_text(size) for size in (info.gpu_allocated, info.gpu_reserved, info.gpu_total) if size is not None
            ),
            info.state,
            "" if info.seconds is None else f"{info.seconds:.2f} s",
        ]
        for info in infos
    ]
    if not any(row[5] for row in rows):
        for row in [head, *rows]:
            del row[5]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    )
