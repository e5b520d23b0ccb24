"""``%dipwatch``: a live table of the ranks below its cell, updated while other cells run.

    cell of %dipwatch    LiveView: one output, and a thread that polls the ranks and updates it
    later cells          wake the thread, because a cell may run on the ranks; it polls rarely while none does
    the end              one line replaces the table: %dipwatch off, another %dipwatch, end of the group, %unload_ext

The thread uses only the control threads of the ranks, so it continues while the main thread waits for a cell.
"""

from __future__ import annotations

import atexit
import html
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from ddip.cluster import folder
from ddip.errors import BadInput, GroupError
from ddip.guard import Guard
from ddip.notebook import arguments
from ddip.notebook.arguments import with_examples
from ddip.notebook.base_magics import GroupMagics
from ddip.output.area import CellOutputArea, cell_number, is_page, new_id

if TYPE_CHECKING:
    from ddip.group.group import Group
    from ddip.notebook.magics import DipMagics
    from ddip.output.tables.vitals_table import RankVitals

REST_SECONDS = 10.0
"""Seconds between two polls while no rank runs a cell; a thread may still start one."""
SOON_SECONDS = 0.3
"""Seconds from the begin or end of a notebook cell until the ranks are polled."""
END_SECONDS = 2.0
"""Maximum seconds to wait for the end of the thread."""
NO_PAGE = "ddip: live updates need a notebook page; here %dipwatch prints the table once, like --once"


@magics_class
class WatchMagics(GroupMagics):
    """``%dipwatch``, for the group of the main magics."""

    def __init__(self, main: DipMagics) -> None:
        super().__init__(main)
        self._view: LiveView | None = None

    @with_examples(
        "%dipwatch              show a live table of the ranks below this cell",
        "%dipwatch off          end the view",
        "%dipwatch --once       print the table once",
    )
    @magic_arguments()
    @argument("switch", nargs="?", metavar="on|off", help="on: show the view below this cell (default); off: end it.")
    @argument("-1", "--once", action="store_true", help="Print the table once, as text.")
    @line_magic
    def dipwatch(self, line: str = "") -> None:
        """Show a live table of the ranks below this cell, updated while other cells run.

        These may run on the ranks or in the notebook. For each rank, the table shows the current operation, cell and
        its duration, optimizer steps per second, progress bars, the share of the last 10 s spent waiting for other
        ranks in collectives, CPU time, memory, GPU use if nvidia-ml-py is installed, and the current line. A rank that
        waits little while all others wait much is named as the straggler.
        """
        args = arguments.parse_line(self.dipwatch, "%dipwatch", line)
        if args.switch not in (None, "on", "off") or (args.switch == "off" and args.once):
            raise BadInput(f"%dipwatch {line.strip()}: type %dipwatch, %dipwatch off, or %dipwatch --once")
        if args.switch == "off":
            if not self._end_view("it was turned off"):
                print("ddip: there is no view to end")
            return
        group = self._main.require_group("%dipwatch")
        if args.once or not is_page():
            self._print_once(group)
            if not args.once:
                print(NO_PAGE)
            return
        self._end_view(f"it moved below cell [{cell_number()}]")
        self._view = LiveView(group)
        self.shell.events.register("pre_run_cell", self._view.cell_begins)
        self.shell.events.register("post_run_cell", self._cell_ends)
        atexit.register(self.close)

    def _print_once(self, group: Group) -> None:
        from ddip.output.tables.vitals_table import table_text

        print(table_text(group.vitals()))

    def _cell_ends(self, result: Any) -> None:
        if self._view is None:
            return
        if self._view.group is not self._main.group:
            self._end_view("its group has ended")
        else:
            self._view.cell_ends()

    def _end_view(self, why: str) -> bool:
        """End the view, and return True; False if there is none."""
        view, self._view = self._view, None
        if view is None:
            return False
        self.shell.events.unregister("pre_run_cell", view.cell_begins)
        self.shell.events.unregister("post_run_cell", self._cell_ends)
        atexit.unregister(self.close)
        view.end(f"ddip: %dipwatch has ended: {why}")
        return True

    def close(self) -> None:
        """End the view when ddip is unloaded or the notebook's kernel ends."""
        self._end_view("ddip was unloaded, or the kernel has ended")


class LiveView:
    """A live table below the cell that is running when this is created."""

    def __init__(self, group: Group) -> None:
        with folder.left_out():
            from ddip.group.watching.vitals import Sampler

        self.group = group
        self._sampler = Sampler(group.lifecycle)
        self._page = CellOutputArea()
        self._carrier_area = self._page
        """Area of the running cell, through which updates are sent: some pages accept no other."""
        self._id = new_id()
        self._shown = ""
        self._lock = threading.Lock()
        self._guard = Guard("the ranks could not be polled", shown=False)
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._last_look = 0.0
        self._busy = self._update()
        self._page.close()
        self._thread = threading.Thread(target=self._run, name="ddip-watch", daemon=True)
        self._thread.start()

    def cell_begins(self, info: Any) -> None:
        """Request a poll soon, because a notebook cell has begun that may run on the ranks."""
        self._carrier_area = CellOutputArea()
        self._carrier_area.close()
        self._wake.set()

    def cell_ends(self) -> None:
        """Request a poll soon, because the notebook cell has ended."""
        self._carrier_area = self._page
        self._wake.set()

    def end(self, text: str) -> None:
        """Stop the thread, wait for it at most END_SECONDS, and replace the table by `text`."""
        self._ended.set()
        self._wake.set()
        self._thread.join(END_SECONDS)
        page = f'<div style="font-size:.8em;opacity:.75">{html.escape(text)}</div>'
        with self._lock:
            self._send(page, text)

    def _run(self) -> None:
        """Poll the ranks until the view ends; runs in the thread."""
        while not self._ended.is_set():
            if self._wake.wait(self._look_seconds if self._busy else REST_SECONDS):
                self._wake.clear()
                soon = max(SOON_SECONDS, self._last_look + self._look_seconds - time.monotonic())
                if self._ended.wait(soon):
                    return
            if not self._ended.is_set():
                with self._guard:
                    self._busy = self._update()

    @property
    def _look_seconds(self) -> float:
        from ddip.group.watching.vitals import sample_period

        return sample_period(self.group.spec.size)

    def _update(self) -> bool:
        """Poll the ranks and update the table; return True if any rank is active."""
        self._last_look = time.monotonic()
        try:
            ranks = self._sampler.look()
        except GroupError:  # the group is restarting or has ended
            ranks = []
        except Exception as error:  # for example between two groups; the next poll tries again
            self._guard.report(error)
            return self._busy
        self._show(ranks)
        return any(rank.state not in ("idle", "ended", "GPU lost") for rank in ranks)

    def _show(self, ranks: Sequence[RankVitals]) -> None:
        from ddip.output.tables.vitals_table import table_html, table_text

        text = table_text(ranks) if ranks else "ddip: there are no ranks just now"
        page = table_html(ranks) if ranks else f"<div>{text}</div>"
        with self._lock:
            if page != self._shown and not self._ended.is_set():
                self._send(page, text)

    def _send(self, page: str, text: str) -> None:
        data = {"text/html": page, "text/plain": text}
        with self._page.by_way_of(self._carrier_area):
            self._page.show(data, display_id=self._id, update=bool(self._shown))
        self._shown = page
