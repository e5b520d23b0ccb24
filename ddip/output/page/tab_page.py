"""The HTML and CSS of the tabs, which degrade to sections on pages that remove styles.

    applies the style (JupyterLab, nbconvert, nbviewer)  tabs
    removes styles (an untrusted notebook, GitHub)       sections with headings: the parts for tabs are ``hidden``
    removes most elements and shows their text           sections with headings: the parts for tabs and the style are in
    (``nbconvert --sanitize-html``)                      a comment; browsers that know ``style`` see no comment, because
                                                         CSS ignores ``<!--`` and ``-->``

Each tab is a radio button: the arrow keys move between the buttons of a group, and a screen reader announces how many
there are and which is selected. The buttons are invisible. The labels in the second output name them and show the
focus; they refer to IDs that never change. The third output is the content.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from ddip.errors import ranks_text

BEGIN_HIDDEN, END_HIDDEN = "<style><!-- ", "<style>--></style>"
"""Markup around a comment for pages that remove ``style``; after `BEGIN_HIDDEN` come CSS rules and ``</style>``."""

RULES = """
.ddip-ranks[hidden]{display:block!important;position:absolute;width:1px;height:1px;margin:-1px;padding:0;border:0;
 overflow:hidden;clip-path:inset(50%);white-space:nowrap}
.jp-OutputArea-child:has(.ddip-ranks){position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.output_subarea:has(>.ddip){padding-top:0;padding-bottom:0}
.ddip{--line:var(--jp-border-color2,var(--vscode-panel-border,#c4c4c4));border-left:2px solid var(--line)}
.ddip-bar[hidden]{display:flex!important;flex-wrap:wrap;align-items:stretch}
.ddip-rank{padding:2px 12px;margin:0;cursor:pointer;font-size:.85em;border-bottom:3px solid var(--line);opacity:.8}
.ddip-rank:hover{opacity:1}
.ddip-runs::after{content:" \\25cf";content:" \\25cf" / " running";color:color-mix(in srgb,#208ffb 60%,currentColor)}
.ddip-failed{color:color-mix(in srgb,#d9362b 65%,currentColor);opacity:1}
.ddip-note{flex:1;text-align:right;padding:2px 8px;font-size:.8em;opacity:.8;border-bottom:3px solid var(--line)}
.ddip-shown{padding:4px 8px;overflow:auto}
.ddip .ddip-shown pre{margin:0;white-space:pre-wrap;word-break:break-word;background:none;border:0;padding:0;
 font-family:var(--jp-code-font-family,var(--notebook-cell-output-font-family,monospace));
 font-size:var(--jp-code-font-size,var(--notebook-cell-output-font-size,13px));
 line-height:var(--jp-code-line-height,var(--notebook-cell-output-line-height,1.3077))}
.ddip .ddip-shown pre.ddip-stderr{background:var(--jp-rendermime-error-background,rgba(221,72,72,.15))}
.ddip .ddip-shown pre.ddip-none{opacity:.8}
.ddip-shown img{max-width:100%}
.ddip-html{contain:content;overflow:auto;min-width:min-content}
@supports not selector(:has(a)){.ddip-bar[hidden]{display:none!important}}
"""
STYLE = f"<style>{RULES}</style>"
CHOSEN = "border-bottom-color:#208ffb;opacity:1;font-weight:bold"
FOCUSED = "outline:2px solid var(--jp-brand-color1,var(--vscode-focusBorder,#1976d2));outline-offset:-2px;opacity:1"


@dataclass(frozen=True)
class Tab:
    """The tab of one rank, or of several with equal output."""

    ranks: Sequence[int]
    body: str
    """HTML of the content."""
    failed: bool = False
    runs: bool = False
    empty: bool = False
    """True if it has no output."""

    @property
    def title(self) -> str:
        """The ranks as text, with a mark if one has failed."""
        return ranks_text(self.ranks) + (" ✗" if self.failed else "")


def buttons_html(name: str, ranks: Sequence[int]) -> str:
    """Return the HTML of the output that never changes: a radio button per rank.

    `name`: prefix of the element IDs, unique on the page. None is selected at first, because it is not known yet which
    rank fails. JupyterLab leaves arrow keys to them.
    """
    inputs = "".join(
        f'<input type="radio" name="{name}" id="{name}-{rank}" aria-label="rank {rank}"'
        f' aria-labelledby="{name}-n{rank}" data-lm-suppress-shortcuts="true">'
        for rank in ranks
    )
    group = f'<div class="ddip-ranks" role="radiogroup" aria-label="output by rank" hidden="hidden">{inputs}</div>'
    return f"{BEGIN_HIDDEN}{RULES}</style>{group}{END_HIDDEN}"


def labels_html(name: str, tabs: Sequence[Tab], note: str) -> str:
    """Return the HTML of the output with the labels of `tabs`, and the CSS of both outputs.

    `note`: a line beside the labels, or empty.

    `name` as in `buttons_html`. Until the user selects a tab, the first that has failed is visible, else the first with
    any output.
    """
    labels = "".join(_label_html(name, number, tab) for number, tab in enumerate(tabs))
    if note:
        labels += f'<span class="ddip-note">{html.escape(note)}</span>'
    bar = f'<div class="ddip ddip-bar" id="{name}-bar" hidden="hidden">{labels}</div>'
    return f"{BEGIN_HIDDEN}{_visibility_rules(name, tabs)}</style>{bar}{END_HIDDEN}"


def sections_html(name: str, tabs: Sequence[Tab], note: str) -> str:
    """Return the HTML of the output with the content of `tabs`.

    For pages without tabs, it has their titles as headings, and the line `note` if not empty.
    """
    sections = "".join(
        f'<div class="ddip-head"><strong>{html.escape(tab.title)}</strong></div>'
        f'<div class="ddip-shown" id="{name}-s{number}" role="group" tabindex="0"'
        f' aria-labelledby="{name}-l{number}">{tab.body}</div>'
        for number, tab in enumerate(tabs)
    )
    if note:
        sections += f'<div class="ddip-head">{html.escape(note)}</div>'
    return f'<div class="ddip" id="{name}">{sections}</div>'


def _label_html(name: str, number: int, tab: Tab) -> str:
    state = "ddip-runs" if tab.runs else "ddip-failed" if tab.failed else ""
    title = ranks_text(tab.ranks) + (' <span role="img" aria-label="failed">✗</span>' if tab.failed else "")
    for rank in reversed(tab.ranks):  # the button of each rank refers to this element as its name
        title = f'<span id="{name}-n{rank}">{title}</span>'
    return f'<label class="ddip-rank {state}" id="{name}-l{number}" for="{name}-{tab.ranks[0]}">{title}</label>'


def _visibility_rules(name: str, tabs: Sequence[Tab]) -> str:
    """Return the CSS that shows the content of the selected tab, and one radio button per tab.

    A tab of several ranks has a button per rank: the checked one is shown, else the first. If none is checked, the
    first failed tab is selected, else the first with output. Without the buttons on the page, all sections stay
    visible.
    """
    on_page = f"body:has(#{name}-{tabs[0].ranks[0]})"
    rules = [
        f"{on_page} #{name} .ddip-shown,{on_page} #{name} .ddip-head{{display:none}}",
        f"body:not({on_page[4:]}) #{name}-bar{{display:none!important}}",
    ]
    default = min(range(len(tabs)), key=lambda number: (not tabs[number].failed, tabs[number].empty, number))
    for number, tab in enumerate(tabs):
        chosen = [f"body:has(#{name}-{rank}:checked)" for rank in tab.ranks]
        if number == default:
            chosen.append(f'{on_page}:not(:has([name="{name}"]:checked))')
        focused = [f"body:has(#{name}-{rank}:focus-visible)" for rank in tab.ranks]
        label, shown = f"#{name}-bar #{name}-l{number}", f"#{name} #{name}-s{number}"
        rules += [
            _css_rule(chosen, shown, "display:block"),
            _css_rule(chosen, label, CHOSEN),
            _css_rule(focused, label, FOCUSED),
        ]
        first, *others = (f"#{name}-{rank}" for rank in tab.ranks)
        rules += [f"{other}:not(:checked),body:has({other}:checked) {first}{{display:none}}" for other in others]
    return "".join(rules)


def _css_rule(pages: Sequence[str], element: str, style: str) -> str:
    return ",".join(f"{page} {element}" for page in pages) + f"{{{style}}}"
