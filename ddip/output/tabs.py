"""The output of several ranks as tabs: HTML and CSS alone, which a saved notebook shows without ddip.

The tabs are two outputs of the cell. The first holds a radio button for each rank, unseen, and never changes, so that
what a person has selected outlives each update of the second: that has the labels, which choose a button, and beside
each label what the rank has shown. A viewer that strips the buttons or the style shows headed sections.
"""

from __future__ import annotations

import html
import time
from collections.abc import Collection, Mapping, Sequence

from ddip.errors import RankError, ranks_text
from ddip.output.area import CellOutputArea, new_id
from ddip.output.bundles import LIVE_CHARACTERS, comparable, fits, to_tab
from ddip.output.colours import to_html
from ddip.output.terminal_text import plain
from ddip.output.transcript import WIDGET, Bundle, RankTranscript, labelled, own_id, plain_of

REDRAW_SECONDS = 0.1
"""How often the tabs are sent again while they change."""
REDRAW_BYTES = 300_000
"""Bytes a second that they may take: Jupyter's server drops messages above a rate, 1 MB/s by default."""

STYLE = """<style>
.jp-OutputArea-child:has(.ddip-ranks){display:none}
.ddip-ranks{display:none}
.ddip{--line:var(--jp-border-color2,var(--vscode-panel-border,#c4c4c4));display:flex;flex-wrap:wrap;
 align-items:center;border-left:2px solid var(--line)}
.ddip-rank{order:1;padding:2px 12px;cursor:pointer;font-size:.85em;border-bottom:2px solid var(--line);opacity:.75}
.ddip-rank:hover{opacity:1}
.ddip-runs::after{content:" \\25cf";color:#208ffb}
.ddip-failed{color:#d9362b}
.ddip-note{order:2;flex:1;text-align:right;padding:2px 8px;font-size:.8em;opacity:.6;
 border-bottom:2px solid var(--line)}
.ddip-shown{order:3;width:100%;padding:4px 8px;overflow-x:auto}
.ddip-shown pre{margin:0;white-space:pre-wrap;word-break:break-word;background:none;border:0;padding:0;
 font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px);line-height:1.3}
.ddip-shown pre.ddip-stderr{background:var(--jp-rendermime-error-background,rgba(221,72,72,.15))}
.ddip-shown img{max-width:100%}
.ddip-html{contain:content;overflow:auto}
@supports not selector(:has(a)){.ddip-shown{display:block!important}}
</style>"""


class Tabs:
    """One tab a rank; in the end ranks with the same output share one."""

    def __init__(self, page: CellOutputArea, ranks: Sequence[int], limit: int) -> None:
        self._page = page
        self._sections = {rank: RankTranscript(limit) for rank in ranks}
        self._html: dict[int, str] = {}
        self._running = set(ranks)
        self._failed: set[int] = set()
        self._errors: dict[int, str] = {}
        self._id = new_id()
        self._begun = False
        self._next = 0.0
        self._note = ""
        self._done = False

    # -- what a rank shows

    def text(self, rank: int, stream: str, text: str, line: int | None) -> None:
        """Text of a stream."""
        self._sections[rank].text(stream, text, line)

    def display(self, rank: int, data: Bundle, metadata: Bundle, display_id: str | None) -> None:
        """A MIME bundle: in the tab if HTML can show it, else below, labelled."""
        section = self._sections[rank]
        if fits(data) or section.is_area(data.get(WIDGET, {}).get("model_id")):
            section.display(data, metadata, display_id)
        else:
            section.display(data, metadata, display_id, below=True)
            self._page.write("stdout", f"[rank {rank}]\n")
            self._page.show(data, metadata, own_id(rank, display_id))

    def update(self, rank: int, data: Bundle, metadata: Bundle, display_id: str) -> None:
        """Something displayed before has changed."""
        if not self._sections[rank].update(data, metadata, display_id):
            self._page.show(data, metadata, own_id(rank, display_id), update=True)

    def result(self, rank: int, number: int, data: Bundle, metadata: Bundle) -> None:
        """The value of the cell's last line."""
        self.display(rank, labelled(f"Out[{number}]:", data), metadata, None)

    def clear(self, rank: int, wait: bool) -> None:
        """The rank clears its output."""
        self._sections[rank].clear(wait)

    def section(self, rank: int) -> RankTranscript:
        """What the rank has shown."""
        return self._sections[rank]

    def ended(self, rank: int, failed: bool) -> None:
        """The rank has finished the cell."""
        self._running.discard(rank)
        if failed:
            self._failed.add(rank)
        self._sections[rank].changed = True

    # -- the page

    def draw(self) -> None:
        """Send the tabs again if something has changed and it is time."""
        now = time.monotonic()
        if now < self._next or not any(section.changed for section in self._sections.values()):
            return
        if not self._begun and not self._has_content:
            return
        for rank, section in self._sections.items():
            if section.changed or rank not in self._html:
                section.changed = False
                self._html[rank] = to_tab(section.items, not self._done)
        sent = self._send()
        self._next = now + max(REDRAW_SECONDS, sent / REDRAW_BYTES)

    def close(self, errors: Mapping[int, RankError], note: str) -> bool:
        """The cell has ended: all there is, ranks with equal output together; returns whether `note` is shown."""
        self._done = True
        self._running.clear()
        if not self._begun and not self._has_content:
            return False
        self._errors = {rank: _told(error) for rank, error in errors.items() if rank in self._sections}
        self._failed = {rank for rank, error in errors.items() if not error.waited}
        self._note = note
        self._html = {rank: to_tab(section.items, False) for rank, section in self._sections.items()}
        self._send()
        self._next = 0.0
        return True

    @property
    def _has_content(self) -> bool:
        return not all(section.empty for section in self._sections.values())

    def _show_buttons(self) -> None:
        buttons = "".join(
            f'<input type="radio" name="{self._id}" id="{self._id}-{rank}"{" checked" if first else ""}>'
            for first, rank in zip([True] + [False] * len(self._sections), self._sections, strict=False)
        )
        self._page.show({"text/html": f'<div class="ddip-ranks">{STYLE}{buttons}</div>', "text/plain": ""})

    def _send(self) -> int:
        """Show the tabs as they are; returns their size."""
        if not self._begun:
            self._show_buttons()
        groups = self._groups()
        parts = [_choice(self._id, groups)]
        texts = []
        for number, (ranks, body) in enumerate(groups):
            title = ranks_text(ranks) + (" ✗" if self._failed.intersection(ranks) else "")
            state = "ddip-failed" if self._failed.intersection(ranks) else ""
            if self._running.intersection(ranks):
                state = "ddip-runs"
            parts.append(
                f'<label class="ddip-rank {state}" id="{self._id}-l{number}" for="{self._id}-{ranks[0]}">'
                f'{title}</label><div class="ddip-shown" id="{self._id}-s{number}">{body}</div>'
            )
            texts.append(f"── {title} ──\n{self._plain(ranks[0])}")
        if self._note:
            parts.append(f'<span class="ddip-note">{html.escape(self._note)}</span>')
            texts.append(self._note)
        page = f'<div class="ddip" id="{self._id}">{"".join(parts)}</div>'
        text = "\n".join(texts)
        self._page.show({"text/html": page, "text/plain": text}, display_id=self._id, update=self._begun)
        self._begun = True
        return len(page) + len(text)

    def _groups(self) -> list[tuple[list[int], str]]:
        """Ranks, and what their tab has inside."""
        groups: list[tuple[list[int], str]] = []
        shown: list[object] = []
        for rank, section in self._sections.items():
            mine = (comparable(section.items), self._errors.get(rank)) if self._done else object()
            if mine in shown:
                groups[shown.index(mine)][0].append(rank)
                continue
            body = self._html.get(rank, "")
            if rank in self._errors:
                body += f"<pre>{to_html(self._errors[rank])}</pre>"
            if not body:
                body = f'<pre class="ddip-none">{"below the tabs" if section.items else "no output"}</pre>'
            groups.append(([rank], body))
            shown.append(mine)
        return groups

    def _plain(self, rank: int) -> str:
        shown = plain_of(self._sections[rank].items, None if self._done else LIVE_CHARACTERS)
        parts = [shown, plain(self._errors.get(rank, ""))]
        return "\n".join(part for part in parts if part)


def _told(error: RankError) -> str:
    if error.waited:
        return f"was blocked in {error.waited}, until ddip aborted it"
    return error.traceback or str(error)


def _choice(name: str, groups: Sequence[tuple[Collection[int], str]]) -> str:
    """The style that shows the tab of the rank whose button is on."""
    rules = [f"body:has(#{name}-{min(groups[0][0])}) #{name} .ddip-shown{{display:none}}"]
    for number, (ranks, _) in enumerate(groups):
        on = [f"body:has(#{name}-{rank}:checked) #{name}" for rank in ranks]
        shown = ",".join(f"{chosen} #{name}-s{number}" for chosen in on)
        label = ",".join(f"{chosen} #{name}-l{number}" for chosen in on)
        rules.append(f"{shown}{{display:block}}{label}{{border-bottom-color:#208ffb;opacity:1;font-weight:bold}}")
    return f"<style>{''.join(rules)}</style>"
