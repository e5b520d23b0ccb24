"""The table of ``%dipshards``: how a model lies on the ranks, as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from ddip.errors import ranks_text
from ddip.output.sizes import size_text
from ddip.protocol.reports import ShardsReport, TensorReport

NUMBERS = 'style="text-align: right; white-space: nowrap"'
WORDS = 'style="text-align: left; white-space: nowrap"'


class ShardsTable:
    """A row each tensor, a column each of the ranks that hold parts of the same shapes; ranks hold `reports`, in order.

    What a front end displays of it is HTML, else text.
    """

    def __init__(self, name: str, reports: Sequence[ShardsReport]) -> None:
        by_rank = [{tensor["name"]: tensor for tensor in report["tensors"] or ()} for report in reports]
        self.tensors: dict[str, TensorReport] = {}
        for tensors in reversed(by_rank):  # the first rank's words count
            self.tensors = {**tensors, **self.tensors, **tensors}
        columns: dict[tuple[tuple[int, ...] | None, ...], list[int]] = {}
        for rank, tensors in enumerate(by_rank):
            shapes = tuple(tuple(tensors[name]["local"]) if name in tensors else None for name in self.tensors)
            columns.setdefault(shapes, []).append(rank)
        self._columns = [(ranks, by_rank[ranks[0]]) for ranks in columns.values()]
        whole = size_text(sum(tensor["whole_bytes"] for tensor in self.tensors.values()))
        held = size_text(sum(tensor["bytes"] for tensors in by_rank for tensor in tensors.values()))
        self.title = f"{name}: {reports[0]['kind']}, {whole} whole, {held} on {len(reports)} ranks"

    @property
    def _head(self) -> list[str]:
        each = [f"{'each of ' * (len(ranks) > 1)}{ranks_text(ranks)}" for ranks, _ in self._columns]
        return ["parameter", "shape", "dtype", "placement", *each]

    @property
    def rows(self) -> list[list[str]]:
        """With the totals, the last one."""
        rows = [
            [name, _shape(tensor["shape"]), tensor["dtype"], tensor["placement"], *self._parts(name)]
            for name, tensor in self.tensors.items()
        ]
        total = [size_text(sum(tensor["bytes"] for tensor in tensors.values())) for _, tensors in self._columns]
        return [*rows, ["total", "", "", "", *total]]

    def _parts(self, name: str) -> list[str]:
        return [_part(tensors, name) for _, tensors in self._columns]

    def __str__(self) -> str:
        rows = [self._head, *self.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 4 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([self.title, *lines])

    def html(self) -> str:
        """The same."""
        styles = [WORDS] * 4 + [NUMBERS] * len(self._columns)
        head = "".join(f"<th {style}>{html.escape(cell)}</th>" for cell, style in zip(self._head, styles, strict=True))
        *rows, total = self.rows
        body = "".join(_row(row, "td", styles) for row in rows)
        return (
            f"<table><caption {WORDS}>{html.escape(self.title)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody><tfoot>{_row(total, 'th', styles)}</tfoot></table>"
        )


def _row(cells: Sequence[str], tag: str, styles: Sequence[str]) -> str:
    inner = "".join(f"<{tag} {style}>{html.escape(cell)}</{tag}>" for cell, style in zip(cells, styles, strict=True))
    return f"<tr>{inner}</tr>"


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _part(tensors: Mapping[str, TensorReport], name: str) -> str:
    tensor = tensors.get(name)
    return "-" if tensor is None else f"{_shape(tensor['local'])} {size_text(tensor['bytes']):>6}"
