"""``%dipcell``: show a cell's output again, below the current notebook cell."""

from __future__ import annotations

from ddip.errors import ranks_text
from ddip.group.cells.cell import Cell
from ddip.group.cells.cell_status import cell_bundle
from ddip.group.cells.comms import Comms
from ddip.output.area import inform
from ddip.output.cells.background_page import BackgroundOutput
from ddip.output.cells.router import CellOutput


def show_again(cell: Cell, comms: Comms | None) -> None:
    """Show the recorded output of `cell` and its error; if it still runs, also its output from now on.

    Does not wait for the cell. `comms`: the relay for its widgets, None if its group has ended. If the recording has
    dropped old output, a line says so.
    """
    left_out = cell.recording.left_out
    if left_out:
        inform(
            f"the first {left_out} outputs of {cell.text} have been discarded; DipMagics.keep_output_bytes sets "
            "the limit"
        )
    output = cell.output
    if output is not None and not cell.done.done():
        begins = f"{cell.text} {'waits for' if cell.state == 'queued' else 'runs on'} {ranks_text(cell.ranks)}"
        live_output = BackgroundOutput(cell.show_ranks, begins, cell.display, comms=comms)
        output.show_again(live_output, dict(cell.replied))
        return
    output_copy = CellOutput(cell.show_ranks, cell.display, comms=comms)
    if output is not None:
        output.show_again(output_copy, {})
    else:
        for rank, message in cell.recording.messages():
            output_copy.receive(rank, message)
        output_copy.finish(cell.errors, cell.summary, lambda: cell_bundle(cell, output_copy.rich))
    if cell.error_text:
        output_copy.page.write("stderr", f"{cell.error_text}\n")
