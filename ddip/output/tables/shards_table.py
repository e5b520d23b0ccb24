"""The table of ``%dipshards``: how a model is divided among the ranks, as text and as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddip.errors import ranks_text
from ddip.output.tables.tables import align_rows, html_table, size_text
from ddip.protocol.reports import ShardsReport, TensorReport


class ShardsTable:
    """A table of how a model is divided among the ranks, which `Group.shards` returns.

    It has a row per tensor, with shape, dtype, placement, and the shape and size of each rank's part; ranks whose parts
    all have the same shapes share a column. ``str`` of it is the table as text, and `html` returns it as HTML.

    Parameters
    ----------
    name
        Name of the model for the title.
    reports
        One report per rank, in rank order.
    """

    def __init__(self, name: str, reports: Sequence[ShardsReport]) -> None:
        by_rank = [{tensor["name"]: tensor for tensor in report["tensors"] or ()} for report in reports]
        self.tensors: dict[str, TensorReport] = {}
        for tensors in reversed(by_rank):  # prefer the first rank's report
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
        """The rows of the table; the last one has the totals."""
        rows = [
            [name, _shape_text(tensor["shape"]), tensor["dtype"], tensor["placement"], *self._part_cells(name)]
            for name, tensor in self.tensors.items()
        ]
        total = [size_text(sum(tensor["bytes"] for tensor in tensors.values())) for _, tensors in self._columns]
        return [*rows, ["total", "", "", "", *total]]

    def _part_cells(self, name: str) -> list[str]:
        return [_part_text(tensors, name) for _, tensors in self._columns]

    def __str__(self) -> str:
        numbers = range(4, len(self._head))
        return f"{self.title}\n{align_rows([self._head, *self.rows], numbers)}"

    def html(self) -> str:
        """Return the table as HTML."""
        numbers = range(4, len(self._head))
        return html_table([self._head, *self.rows], numbers, self.title, total=True)


def _shape_text(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _part_text(tensors: Mapping[str, TensorReport], name: str) -> str:
    tensor = tensors.get(name)
    return "-" if tensor is None else f"{_shape_text(tensor['local'])} {size_text(tensor['bytes']):>6}"
