"""What the cells of ranks that show widgets, and whoever passes on the widgets' messages, know of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ddip.output.area import CellOutputArea
from ddip.output.transcript import Area, Display, Item, Text
from ddip.output.views import Plain
from ddip.output.widget_bars import WidgetBars

Message = dict[str, Any]


class WidgetCell(Protocol):
    """A cell that shows widgets, as whoever passes on their messages sees it."""

    page: CellOutputArea

    def late(self, rank: int, message: Message) -> None:
        """What came when the cell had ended."""

    def keeps(self, rank: int, model: str) -> bool:
        """Does the tab of the rank show what this Output widget captures?"""

    def take(self, rank: int, model: str) -> list[Item]:
        """What it has captured; the page shows it from here on."""

    def widget_closed(self, rank: int, model: str) -> None:
        """The rank has closed the widget."""


class Comms(Protocol):
    """Whoever passes on the messages of widgets."""

    bars: WidgetBars
    """What is known of those that are progress bars."""

    def relay(self, rank: int, message: Message, cell: WidgetCell, shown: bool = True) -> None:
        """A message of a widget of `rank`, which came with the output of `cell`."""

    def show(self, name: str, cell: WidgetCell) -> None:
        """`cell` shows the widget: what its callbacks show later belongs there."""

    def cell_of(self, name: str) -> WidgetCell | None:
        """Where the widget is shown, or was made."""

    def tell(self, name: str, page: CellOutputArea) -> None:
        """Have the page know the widget."""


def replay(view: Plain, rank: int, items: Sequence[Item]) -> None:
    """Show `items` of `rank` once more."""
    for item in items:
        if isinstance(item, Text):
            view.text(rank, item.stream, item.screen.text, None)
        elif isinstance(item, Display):
            view.display(rank, item.data, item.metadata, item.display_id)
        elif isinstance(item, Area):
            replay(view, rank, item.items)
