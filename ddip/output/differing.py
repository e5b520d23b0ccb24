"""The output of a cell that has run in the notebook, too: only of ranks that have shown something else."""

from __future__ import annotations

from collections.abc import Sequence

from ddip.output.display_options import DisplayOptions
from ddip.output.labels import Labels
from ddip.output.router import CellOutput
from ddip.output.views import Beside, Errors, View
from ddip.output.widget_cells import Comms, Message

Shown = tuple[str, str]
"""stdout with the value of the last line, and stderr."""


class Differing(CellOutput):
    """Shows what ranks have to say when the cell has ended, of those that do not repeat what it has shown `here`."""

    def __init__(self, ranks: Sequence[int], display: DisplayOptions, here: Shown, *, comms: Comms) -> None:
        super().__init__(ranks, display, quiet=True, comms=comms)
        self._here = here

    def finish(self, errors: Errors | None = None, note: str = "", beside: Beside = dict) -> frozenset[int]:
        """See `CellOutput`; each rank is named, since a line without a name is the notebook's."""
        self.show_ranks = frozenset(rank for rank in self.show_ranks if self._differs(rank))
        self._kept = [(rank, message) for rank, message in self._kept or [] if rank in self.show_ranks]
        limit = self.display.max_output_chars
        self._view: View = Labels(self.page, limit) if len(self.show_ranks) == 1 else self._new_view()
        return super().finish(errors, note, beside)

    def _differs(self, rank: int) -> bool:
        shown = shown_by([message for other, message in self._kept or [] if other == rank])
        return any(shown) and shown != self._here


def shown_by(messages: Sequence[Message]) -> Shown:
    """What they say, as text."""
    out, err = "", ""
    for message in messages:
        content = message["content"]
        match message["header"]["msg_type"]:
            case "stream" if content["name"] == "stderr":
                err += content["text"]
            case "stream":
                out += content["text"]
            case "execute_result":
                out += content["data"].get("text/plain", "")
    return out, err
