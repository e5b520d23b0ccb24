"""``%dipwatch``: what each rank does just now, below the cell that asks for it, while other cells run.

    cell of %dipwatch    LiveView: one output, and a thread that looks at the ranks and changes it
    cells that follow    wake the thread: a cell may run on the ranks now; it rests while none does
    the end              one line in place of the table: %dipwatch off or again, no group any more, %unload_ext

The thread asks the control threads of the ranks and nothing else, so it goes on while the main thread waits for a cell.
"""

from __future__ import annotations

import atexit
import html
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from ddip.cluster import folder
from ddip.errors import BadInput, GroupError
from ddip.guard import Guard
from ddip.notebook import arguments
from ddip.notebook.arguments import examples
from ddip.output.area import CellOutputArea, cell_number, is_page, new_id

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddip.group.group import Group
    from ddip.notebook.magics import DipMagics
    from ddip.output.tables.vitals_table import RankVitals

REST_SECONDS = 10.0
"""How often ranks are looked at while none of them runs a cell: one may have been given to them by a thread."""
SOON_SECONDS = 0.3
"""After a cell of the notebook's has begun, or ended, the ranks are looked at."""
END_SECONDS = 2.0
"""For which the end of the thread is waited for."""
NO_PAGE = "ddip: only a notebook's page can be kept up to date; here %dipwatch prints the table once, as --once does"


@magics_class
class WatchMagics(Magics):
    """They are beside the other magics, whose group they watch."""

    shell: InteractiveShell

    def __init__(self, main: DipMagics) -> None:
        super().__init__(shell=main.shell)
        self._main = main
        self._view: LiveView | None = None

    @examples(
        "%dipwatch              what each rank does, kept up to date below this cell",
        "%dipwatch off          end that",
        "%dipwatch --once       print it once",
    )
    @magic_arguments()
    @argument("switch", nargs="?", metavar="on|off", help="off: end the view. Without it: begin, below this cell.")
    @argument("-1", "--once", action="store_true", help="Print the table once, as text.")
    @line_magic
    def dipwatch(self, line: str = "") -> None:
        """Watch the ranks: a table below this cell, which goes on while other cells run, on the ranks or here.

        Of each rank: what it does, in which cell and for how long, optimizer steps a second, progress bars, the share
        of the last 10 s that it has waited for others in collectives, CPU time and memory with the GPU's if
        nvidia-ml-py is installed, and the line where it is. Who waits little while all others wait much is named as the
        straggler.
        """
        args = arguments.parse(self.dipwatch, "%dipwatch", line)
        if args.switch not in (None, "on", "off") or (args.switch == "off" and args.once):
            raise BadInput(f"%dipwatch {line.strip()}: type %dipwatch, %dipwatch off, or %dipwatch --once")
        if args.switch == "off":
            if not self._end("it was turned off"):
                print("ddip: nothing is watched")
            return
        group = self._main.require_group("%dipwatch")
        if args.once or not is_page():
            self._print_once(group)
            if not args.once:
                print(NO_PAGE)
            return
        self._end(f"it is below cell [{cell_number()}] now")
        self._view = LiveView(group)
        self.shell.events.register("pre_run_cell", self._cell_begins)
        self.shell.events.register("post_run_cell", self._cell_ends)
        atexit.register(self.close)

    def _print_once(self, group: Group) -> None:
        from ddip.output.tables.vitals_table import table_text

        print(table_text(group.vitals()))

    def _cell_begins(self, info: Any) -> None:
        if self._view is not None:
            self._view.cell_begins()

    def _cell_ends(self, result: Any) -> None:
        if self._view is None:
            return
        if self._view.group is not self._main.group:
            self._end("its group has ended")
        else:
            self._view.cell_ends()

    def _end(self, why: str) -> bool:
        """End the view, if there is one; returns whether there was."""
        view, self._view = self._view, None
        if view is None:
            return False
        self.shell.events.unregister("pre_run_cell", self._cell_begins)
        self.shell.events.unregister("post_run_cell", self._cell_ends)
        atexit.unregister(self.close)
        view.end(f"ddip: %dipwatch has ended: {why}")
        return True

    def close(self) -> None:
        """ddip is unloaded, or the notebook's kernel ends."""
        self._end("ddip was unloaded, or the kernel has ended")


class LiveView:
    """The table below the cell that runs when this is made, kept up to date."""

    def __init__(self, group: Group) -> None:
        with folder.left_out():
            from ddip.group.watching.vitals import Sampler

        self.group = group
        self._sampler = Sampler(group.lifecycle)
        self._page = CellOutputArea()
        self._way = self._page
        """The cell that runs: some pages listen to no other."""
        self._id = new_id()
        self._shown = ""
        self._lock = threading.Lock()
        self._guard = Guard("the ranks could not be looked at", shown=False)
        self._over = threading.Event()
        self._wake = threading.Event()
        self._looked = 0.0
        self._busy = self._look()
        self._page.close()
        self._thread = threading.Thread(target=self._run, name="ddip-watch", daemon=True)
        self._thread.start()

    def cell_begins(self) -> None:
        """A cell of the notebook's begins: it may be one for the ranks."""
        self._way = CellOutputArea()
        self._way.close()
        self._wake.set()

    def cell_ends(self) -> None:
        """It has ended."""
        self._way = self._page
        self._wake.set()

    def end(self, text: str) -> None:
        """Leave `text` in place of the table."""
        self._over.set()
        self._wake.set()
        self._thread.join(END_SECONDS)
        page = f'<div style="font-size:.8em;opacity:.75">{html.escape(text)}</div>'
        with self._lock:
            self._send(page, text)

    def _run(self) -> None:
        """In the thread."""
        while not self._over.is_set():
            if self._wake.wait(self._period if self._busy else REST_SECONDS):
                self._wake.clear()
                soon = max(SOON_SECONDS, self._looked + self._period - time.monotonic())
                if self._over.wait(soon):
                    return
            if not self._over.is_set():
                with self._guard:
                    self._busy = self._look()

    @property
    def _period(self) -> float:
        from ddip.group.watching.vitals import period

        return period(self.group.spec.size)

    def _look(self) -> bool:
        """Look at the ranks, and show what has changed; returns whether one of them runs something."""
        self._looked = time.monotonic()
        try:
            ranks = self._sampler.look()
        except GroupError:  # it restarts, or has ended just now
            ranks = []
        except Exception as error:  # between two groups: the next look is another one
            self._guard.report(error)
            return self._busy
        self._show(ranks)
        return any(rank.state not in ("idle", "ended", "GPU lost") for rank in ranks)

    def _show(self, ranks: Sequence[RankVitals]) -> None:
        from ddip.output.tables.vitals_table import table_html, table_text

        text = table_text(ranks) if ranks else "ddip: there are no ranks just now"
        page = table_html(ranks) if ranks else f"<div>{text}</div>"
        with self._lock:
            if page != self._shown and not self._over.is_set():
                self._send(page, text)

    def _send(self, page: str, text: str) -> None:
        data = {"text/html": page, "text/plain": text}
        with self._page.by_way_of(self._way):
            self._page.show(data, display_id=self._id, update=bool(self._shown))
        self._shown = page
