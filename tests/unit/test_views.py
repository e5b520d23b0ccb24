"""What the views make of the output of ranks, on a page that records what it is shown."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ddip.errors import RankError
from ddip.output import transcript
from ddip.output.page.bundles import LIVE_CHARACTERS
from ddip.output.transcript import WIDGET, RankTranscript, plain_of
from ddip.output.views.grouped import Grouped
from ddip.output.views.labels import Labels
from ddip.output.views.tabs import Tabs
from ddip.output.views.views import Plain, View

LIMIT = 100_000
PICTURE = {"image/png": "aaaa", "text/plain": "<Figure>"}


class Page:
    """A stand-in for ``CellOutputArea``."""

    rich = True
    terminal = False
    closed = False

    def __init__(self) -> None:
        self.beside: dict[str, Any] = {}
        self.written: list[tuple[str, str]] = []
        self.shown: list[dict[str, Any]] = []
        """One entry per display; an update replaces the entry with its ID."""
        self.ids: list[str | None] = []
        self.sent = 0
        self.cleared: list[bool] = []

    def write(self, stream: str, text: str) -> None:
        self.written.append((stream, text))

    def show(
        self, data: dict[str, Any], metadata: Any = None, display_id: str | None = None, update: bool = False
    ) -> None:
        self.sent += 1
        if update:
            self.shown[self.ids.index(display_id)] = data
        else:
            self.shown.append(data)
            self.ids.append(display_id)

    def clear(self, wait: bool) -> None:
        self.cleared.append(wait)

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.written)

    @property
    def plain(self) -> list[str]:
        return [data.get("text/plain", "") for data in self.shown]


@pytest.fixture
def page() -> Page:
    return Page()


def new_tabs(page: Page, count: int = 2) -> Tabs:
    return Tabs(page, range(count), LIMIT)  # type: ignore[arg-type]


def new_grouped(page: Page, count: int = 2) -> Grouped:
    return Grouped(page, range(count), LIMIT)  # type: ignore[arg-type]


def new_plain(page: Page, limit: int = LIMIT) -> Plain:
    return Plain(page, limit)  # type: ignore[arg-type]


def write_texts(view: View, *texts: str, stream: str = "stdout") -> None:
    """Write one text per rank."""
    for rank, text in enumerate(texts):
        view.text(rank, stream, text, None)


# -- tabs


def test_running_ranks_have_tabs_and_equal_ranks_share_one_afterwards(page: Page) -> None:
    view = new_tabs(page, 3)
    write_texts(view, "a\n", "a\n", "b\n")
    view.draw()
    buttons, labels, shown = page.shown
    assert buttons["text/html"].count("<input") == 3 and "checked" not in buttons["text/html"]
    assert labels["text/html"].count("ddip-runs") == 3
    assert shown["text/plain"] == "── rank 0 ──\na\n── rank 1 ──\na\n── rank 2 ──\nb"
    assert view.close({}, "12 s")
    assert page.shown[2]["text/plain"] == "── ranks 0, 1 ──\na\n── rank 2 ──\nb\n12 s"
    assert "ddip-runs" not in page.shown[1]["text/html"] and '<span class="ddip-note">12 s</span>' in str(page.shown[1])


def test_buttons_and_labels_are_sent_once(page: Page) -> None:
    view = new_tabs(page)
    for number in range(5):
        write_texts(view, f"{number}\n")
        view._next = 0.0
        view.draw()
    assert len(page.shown) == 3 and page.sent == 7
    view.ended(1, True)
    view._next = 0.0
    view.draw()
    assert page.sent == 9 and "ddip-failed" in page.shown[1]["text/html"]


def test_tabs_that_have_not_changed_are_not_sent_again(page: Page) -> None:
    view = new_tabs(page)
    write_texts(view, "a")
    for _ in range(5):
        view._next = 0.0
        view.draw()
    assert page.sent == 3


def test_a_view_without_output_draws_nothing(page: Page) -> None:
    view = new_tabs(page)
    view.ended(0, False)
    view.draw()
    assert not view.close({}, "12 s") and page.shown == []


def test_an_error_appears_in_the_tab_of_its_rank(page: Page) -> None:
    view = new_tabs(page, 3)
    write_texts(view, "a\n")
    view.ended(1, True)
    view.draw()
    assert page.plain[2].splitlines()[2] == "── rank 1 ✗ ──"
    waited = RankError("RuntimeError", "gloo", "", waited="barrier")
    assert view.close({1: RankError("ValueError", "no", "the traceback"), 2: waited}, "")
    assert page.plain[2].splitlines() == [
        "── rank 0 ──",
        "a",
        "── rank 1 ✗ ──",
        "the traceback",
        "── rank 2 ──",
        "was blocked in barrier, until ddip aborted it",
    ]
    assert "<pre>the traceback</pre>" in page.shown[2]["text/html"]


def test_displays_without_html_appear_below_with_their_rank(page: Page) -> None:
    view = new_tabs(page)
    view.display(1, {WIDGET: {"model_id": "m"}, "text/plain": "a widget"}, {}, "x")
    view.display(0, {"text/html": "<script>alert()</script>"}, {}, None)
    assert page.plain[3:5] == ["[rank 0]", ""] and "alert" in page.shown[4]["text/html"]
    assert page.plain[5:] == ["[rank 1]", "a widget"] and page.written == []
    view.update(1, {"text/plain": "changed"}, {}, "x")
    assert page.plain[3:] == ["[rank 0]", "", "[rank 1]", "changed"]
    view.text(0, "stdout", "above\n", None)
    view.draw()
    assert page.shown[0]["text/html"].count("<input") == 2 and "above" in page.plain[2]


def visible_texts(page: Page) -> list[str]:
    """Return the texts of all outputs that are not empty."""
    return [text for text in page.plain if text]


def widget_data(name: str) -> dict[str, Any]:
    return {WIDGET: {"model_id": name}, "text/plain": name}


def test_displays_below_tabs_are_ordered_and_labelled_by_rank(page: Page) -> None:
    view = new_tabs(page, 3)
    for rank in (2, 0, 1, 2, 0):
        view.display(rank, widget_data(f"bar of {rank}"), {}, None)
    assert visible_texts(page) == [
        *("[rank 0]", "bar of 0", "bar of 0"),
        *("[rank 1]", "bar of 1"),
        *("[rank 2]", "bar of 2", "bar of 2"),
    ]


def script_data(text: str) -> dict[str, Any]:
    return {"application/javascript": "run()", "text/html": f"<div>{text}</div>", "text/plain": text}


def test_a_widget_does_not_replace_another_that_is_shown(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """JupyterLab would hide the widget when the other one closes."""
    view, show = new_tabs(page), page.show
    followed: list[tuple[Any, Any]] = []

    def record_update(data: Any, metadata: Any = None, display_id: str | None = None, update: bool = False) -> None:
        if update:
            followed.append((page.shown[page.ids.index(display_id)].get(WIDGET), data.get(WIDGET)))
        show(data, metadata, display_id, update)

    monkeypatch.setattr(page, "show", record_update)
    for rank, text in ((1, "0 %"), (0, "0 %")):
        view.display(rank, {WIDGET: {"model_id": f"of {rank}"}, "text/plain": text}, {}, "bar")
    view.update(0, {WIDGET: {"model_id": "of 0"}, "text/plain": "100 %"}, {}, "bar")
    assert [data[WIDGET]["model_id"] for data in page.shown if WIDGET in data] == ["of 0", "of 1"]
    both = [(before, after) for before, after in followed if before and after]
    assert both == [({"model_id": "of 0"}, {"model_id": "of 0"})]


def test_a_script_is_shown_once_and_stays_in_place(page: Page) -> None:
    view = new_tabs(page, 3)
    view.display(2, script_data("plot of 2"), {}, None)
    view.display(2, widget_data("bar of 2"), {}, None)
    view.display(0, script_data("plot of 0"), {}, None)
    view.display(1, script_data("plot of 1"), {}, None)
    assert visible_texts(page) == ["[rank 0]", "plot of 0", "[rank 2]", "bar of 2"]
    view.ended(1, False)
    assert "plot of 1" not in page.plain  # rank 0 may show more
    view.ended(0, False)
    view.display(2, script_data("another of 2"), {}, None)
    view.close({}, "")
    assert visible_texts(page) == [
        *("[rank 0]", "plot of 0"),
        *("[rank 1]", "plot of 1"),
        *("[rank 2]", "plot of 2", "bar of 2", "another of 2"),
    ]
    view.display(0, script_data("late"), {}, None)
    assert visible_texts(page)[-2:] == ["[rank 0]", "late"]  # the plots of other ranks cannot move
    view.display(0, script_data("later"), {}, None)
    assert visible_texts(page)[-3:] == ["[rank 0]", "late", "later"]


def test_a_label_disappears_with_its_display(page: Page) -> None:
    view = new_tabs(page)
    for rank in (0, 1):
        view.display(rank, widget_data("outer"), {}, None)
    for number in range(3):
        view.display(0, widget_data(f"inner {number}"), {}, None)
        assert visible_texts(page) == ["[rank 0]", "outer", f"inner {number}", "[rank 1]", "outer"]
        view.widget_closed(0, f"inner {number}")
        assert visible_texts(page) == ["[rank 0]", "outer", "[rank 1]", "outer"]
    view.clear(0, wait=False)
    assert visible_texts(page) == ["[rank 1]", "outer"]
    view.clear(1, wait=True)
    view.display(1, script_data("plot"), {}, None)
    view.ended(0, False)
    assert visible_texts(page) == ["[rank 1]", "plot"]
    view.clear(1, wait=False)
    view.close({}, "")
    assert visible_texts(page) == []


def test_a_display_that_only_loads_a_library_has_no_label(page: Page) -> None:
    view = new_tabs(page)
    view.display(0, {"application/javascript": "load()", "application/vnd.bokehjs_load.v0+json": "load()"}, {}, None)
    view.display(
        0, {"text/html": "<script>window.PlotlyConfig = '<b>'</script> <script src='plotly'></script>"}, {}, None
    )
    assert visible_texts(page) == []
    view.display(0, {"text/html": '<div id="plot"></div>'}, {}, None)  # filled by the next display
    view.display(0, {"application/javascript": "fill()"}, {}, None)
    assert visible_texts(page) == ["[rank 0]"] and [data for data in page.shown if 'id="plot"' in str(data)] == [
        page.shown[-2]
    ]


@pytest.mark.parametrize("html", ['<b id="a">1</b>', '<p id="a"><img src="x"></p>', "<div></div>"])
def test_html_that_shows_something_is_in_its_tab(page: Page, html: str) -> None:
    view = new_tabs(page)
    view.display(0, {"text/html": html}, {}, None)
    view.close({}, "")
    assert len(page.shown) == 3 and html.split(">")[0] in page.shown[2]["text/html"]


def test_a_bar_that_wipes_itself_out_leaves_no_tabs(page: Page) -> None:
    view = new_tabs(page)
    write_texts(view, "\r 50%", "\r 50%", stream="stderr")
    view.draw()
    assert len(visible_texts(page)) == 1
    write_texts(view, "\r     \r", "\r     \r", stream="stderr")
    assert not view.close({}, "12 s")
    assert visible_texts(page) == []
    write_texts(view, "late\n")
    view._next = 0.0
    view.draw()
    assert visible_texts(page) == ["── rank 0 ──\nlate\n── rank 1 ──\n"]


def test_displays_and_results_go_into_the_tab(page: Page) -> None:
    view = new_tabs(page)
    view.display(0, PICTURE, {}, "p")
    view.display(0, {"text/latex": "$x<1$"}, {}, None)
    view.display(0, {"text/html": "<b>bold</b>"}, {}, None)
    view.display(0, {"text/markdown": "*m*"}, {}, None)
    view.result(1, 7, {"text/plain": "1\n2"}, {})
    view.draw()
    html = page.shown[2]["text/html"]
    assert all(part in html for part in ("data:image/png;base64,aaaa", "$x&lt;1$", "<b>bold</b>", "*m*"))
    assert page.plain[2].endswith("── rank 1 ──\nOut[7]:\n1\n2")
    view.update(0, {"text/plain": "gone"}, {}, "p")
    view._next = 0.0
    view.draw()
    assert "aaaa" not in page.shown[2]["text/html"]


def test_long_text_shows_its_last_rows_until_the_end(page: Page) -> None:
    view = new_tabs(page)
    write_texts(view, "first\n" + "x" * 99 + "\n" + ("y" * 99 + "\n") * (LIVE_CHARACTERS // 100) + "last\n")
    view.draw()
    assert "last" in page.plain[2] and "first" not in page.plain[2]
    view.close({}, "")
    assert "first" in page.plain[2]


REPR = {"text/plain": "<IPython.core.display.Thing object>"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"text/markdown": "# *one*"}, {"text/markdown": "# *other*"}),
        ({"application/json": {"a": 1}}, {"application/json": {"a": 2}}),
        ({"application/json": {"a": 1}}, {"application/json": {"a": True}}),
        ({"image/png": "aaaa"}, {"image/png": "bbbb"}),
        ({"text/html": "<b>x</b>", "text/latex": "$x$"}, {"text/html": "<b>x</b>", "text/latex": "$y$"}),
        ({"text/x-odd": "one"}, {"text/x-odd": "other"}),
        ({"application/vnd.plotly.v1+json": {"data": [1]}}, {"application/vnd.plotly.v1+json": {"data": [2]}}),
    ],
    ids=["Markdown", "JSON", "JSON of another type", "picture", "what is not seen", "odd", "below the tabs"],
)
@pytest.mark.parametrize("style", [new_tabs, new_grouped])
def test_different_displays_never_count_as_the_same(page: Page, style: Any, one: Any, other: Any) -> None:
    view = style(page, 3)
    write_texts(view, "text\n", "text\n", "text\n")
    for rank, data in enumerate((one, other, one)):
        view.display(rank, {**data, **REPR}, {}, None)
    view.close({}, "")
    shown = page.text + "\n".join(page.plain)
    assert "── ranks 0, 2 ──" in shown and "── rank 1 ──" in shown


@pytest.mark.parametrize("style", [new_tabs, new_grouped])
def test_displays_with_different_metadata_differ(page: Page, style: Any) -> None:
    view = style(page)
    view.display(0, PICTURE, {"image/png": {"width": 3}}, "x")
    view.display(1, PICTURE, {"image/png": {"width": 4}}, "x")
    view.close({}, "")
    assert "── rank 1 ──" in page.text + "\n".join(page.plain)


def test_omitted_output_never_counts_as_the_same(page: Page) -> None:
    view = new_tabs(page)
    for rank in (0, 1):
        view.text(rank, "stdout", "first\n", None)
        view.text(rank, "stdout", "last\n", 5000)
    view.close({}, "")
    assert "── rank 1 ──" in page.plain[2]


def test_markdown_and_json_are_shown_as_their_source(page: Page) -> None:
    view = new_tabs(page)
    view.display(0, {"text/markdown": "# <title>", **REPR}, {}, None)
    view.display(0, {"application/json": {"é": [1]}, **REPR}, {}, None)
    view.close({}, "")
    assert '<pre># &lt;title&gt;</pre><pre>{\n  "é": [\n    1\n  ]\n}</pre>' in page.shown[2]["text/html"]
    assert page.plain[2].startswith('── rank 0 ──\n# <title>\n{\n  "é": [')


def test_a_bar_is_not_marked_as_a_warning(page: Page) -> None:
    view = new_tabs(page)
    view.text(0, "stderr", "\r 50%", None)
    view.text(0, "stderr", "\r100%\n", None)
    view.text(1, "stderr", "warned\n", None)
    view.close({}, "")
    html = page.shown[2]["text/html"]
    assert '<pre class="ddip-stdout">100%' in html and '<pre class="ddip-stderr">warned' in html


def opened_tab(page: Page) -> str:
    """Return the number of the tab that is shown until a person chooses one."""
    found = re.search(r":checked\)\) #\S+ #\S+-s(\d+)\{display:block\}", page.shown[1]["text/html"])
    assert found is not None
    return found[1]


def test_the_first_failed_tab_opens_or_the_first_with_output(page: Page) -> None:
    view = new_tabs(page, 4)
    for rank in (1, 2):  # as with %%dip -S all -r 1,2
        view.text(rank, "stdout", f"{rank}\n", None)
    view.draw()
    assert opened_tab(page) == "1"
    view.ended(2, True)
    view._next = 0.0
    view.draw()
    assert opened_tab(page) == "2"
    view.close({2: RankError("ValueError", "no", "traceback"), 1: RankError("E", "", "", waited="barrier")}, "")
    assert opened_tab(page) == "2" and "── rank 2 ✗ ──" in page.plain[2]


def test_ranks_without_output_are_not_open(page: Page) -> None:
    view = new_tabs(page, 3)
    view.text(1, "stdout", "a\n", None)
    view.close({}, "")
    assert opened_tab(page) == "1" and "── ranks 0, 2 ──" in page.plain[2]


# -- grouped


def test_ranks_with_equal_output_are_grouped_at_the_end(page: Page) -> None:
    view = new_grouped(page, 4)
    write_texts(view, "a\n", "b", "a\n")
    view.result(1, 3, {"text/plain": "7"}, {})
    view.draw()
    assert not page.written
    assert not view.close({}, "")
    assert page.text == "── ranks 0, 2 ──\na\n── rank 1 ──\nb\n"
    assert page.plain == ["Out[3]: 7"]


def test_late_output_forms_its_own_group(page: Page) -> None:
    view = new_grouped(page)
    write_texts(view, "a\n")
    view.close({}, "")
    view.text(1, "stderr", "late\n", None)
    view.draw()
    assert page.text == "── rank 0 ──\na\n── rank 1 ──\nlate\n"
    assert page.written[-1][0] == "stderr"


def test_a_grouped_display_is_changed_before_it_is_shown(page: Page) -> None:
    view = new_grouped(page)
    view.display(0, {"text/plain": "old"}, {}, "d")
    view.update(0, {"text/plain": "new"}, {}, "d")
    view.text(1, "stdout", "gone", None)
    view.clear(1, False)
    view.section(1).add_area("area")
    view.section(1).capture("area", True)
    view.text(1, "stdout", "captured\n", None)
    view.section(1).capture("area", False)
    view.display(1, {WIDGET: {"model_id": "area"}}, {}, None)
    view.ended(0, False)
    view.close({}, "")
    assert page.plain == ["new"] and page.text == "── rank 0 ──\n── rank 1 ──\ncaptured\n"


def test_equal_widgets_belong_to_their_own_ranks(page: Page) -> None:
    view = new_grouped(page)
    for rank in (0, 1):
        view.display(rank, {WIDGET: {"model_id": f"slider {rank}"}, "text/plain": "a slider"}, {}, None)
        view.display(rank, widget_data(f"bar {rank}"), {}, None)
        view.widget_closed(rank, f"bar {rank}")
    view.close({}, "")
    assert page.text == "── rank 0 ──\n── rank 1 ──\n"
    assert [data[WIDGET]["model_id"] for data in page.shown] == ["slider 0", "slider 1"]


# -- one rank


def test_a_bar_is_one_display_ending_at_ordinary_text(page: Page) -> None:
    view = new_plain(page)
    view.text(0, "stderr", "before\n\r  0%", None)
    view.text(0, "stderr", "\r 50%", None)
    view.text(0, "stderr", "\r100%\n", None)
    view.text(0, "stderr", "after\n", None)
    assert page.written == [("stderr", "before\n"), ("stderr", "after\n")]
    assert page.plain == ["100%"]


def test_a_changing_bar_is_drawn_rarely_until_the_end(page: Page) -> None:
    view = new_plain(page)
    for percent in range(100):
        view.text(0, "stderr", f"\r{percent}%", None)
        view.draw()
    assert page.sent < 100
    view.close({}, "")
    assert page.plain == ["99%"]


@pytest.mark.parametrize("rich", [True, False])
def test_long_output_loses_its_middle(page: Page, rich: bool) -> None:
    page.rich = rich
    view = new_plain(page, limit=1000)
    view.text(0, "stdout", "first\n", None)
    view.text(0, "stdout", "row 5000\n", 5000)
    view.text(0, "stdout", "row 5001\n", None)
    view.draw()
    view.close({}, "")
    assert page.written[0] == ("stdout", "first\n")
    assert page.text.endswith("row 5000\nrow 5001\n")
    note = page.plain[-1] if rich else page.written[1][1]
    assert re.fullmatch(r"… 4,99\d lines left out …\n?", note)


def test_a_long_line_loses_its_middle_in_a_page(page: Page) -> None:
    view, first, last = new_plain(page, limit=1000), "a" * 500, "b" * 500
    for text, line, cut in ((first, None, 0), ("\n", None, 0), (last, 1, 4000)):
        view.text(0, "stdout", text, line, cut)
        view.draw()
    assert page.plain == [f"… 4,000 characters left out …\n{last}"]
    view.close({}, "")
    assert page.plain == ["… 4,000 characters left out …"] and page.text == f"{first}\n{last}"


def test_a_long_line_loses_its_middle_in_tabs(page: Page) -> None:
    view = Tabs(page, range(2), 1000)  # type: ignore[arg-type]
    first, last = "a" * 500, "b" * 500
    for rank in (0, 1):
        for text, line, cut in ((first, None, 0), ("\n", None, 0), (last, 1, 4000)):
            view.text(rank, "stdout", text, line, cut)
            view._next = 0.0
            view.draw()
    expected = f"{first}\n… 4,000 characters left out …\n{last}"
    assert page.plain[-1] == f"── rank 0 ──\n{expected}\n── rank 1 ──\n{expected}"
    view.close({}, "")
    assert page.plain[-1].count("4,000 characters left out") == 2 and last in page.shown[-1]["text/html"]


def test_clearing_ends_a_bar(page: Page) -> None:
    view = new_plain(page)
    view.text(0, "stderr", "\r 50%", None)
    view.clear(0, True)
    view.text(0, "stderr", "\r 10%", None)
    assert page.cleared == [True] and page.plain == [" 50%", " 10%"]


def test_displays_of_one_rank_keep_their_order(page: Page) -> None:
    view = new_plain(page)
    view.display(0, PICTURE, {}, "x")
    view.update(0, {"text/plain": "changed"}, {}, "x")
    view.result(0, 4, {"text/plain": "5"}, {})
    view.ended(0, False)
    assert page.plain == ["changed", "Out[0:4]: 5"]


# -- the record of a rank's output


def test_text_continues_its_unfinished_line() -> None:
    shown = RankTranscript(LIMIT)
    shown.text("stdout", "half", None)
    shown.text("stderr", "!\n", None)
    shown.text("stdout", " whole\n", None)
    shown.text("stdout", "new\n", None)
    assert plain_of(shown.items) == "half whole\n!\nnew"


def test_a_line_number_replaces_the_end_of_earlier_text() -> None:
    shown = RankTranscript(LIMIT)
    shown.text("stdout", "0\n1\n", None)
    shown.text("stdout", "900\n", 900)
    assert "898 lines left out" in plain_of(shown.items)


def test_a_pending_clear_waits_for_the_next_output() -> None:
    shown = RankTranscript(LIMIT)
    shown.display({"text/plain": "a"})
    shown.clear(wait=True)
    assert plain_of(shown.items) == "a"
    shown.display({"text/plain": "b"})
    assert plain_of(shown.items) == "b"
    shown.clear(wait=False)
    assert shown.items == [] and shown.changed


@pytest.mark.parametrize("style", [Tabs, Grouped])
def test_a_display_costs_the_same_however_many_there_are(
    page: Page, style: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked = 0

    def count_walked(items: list[transcript.Item]) -> list[transcript.Display]:
        nonlocal walked
        walked += len(items)
        return all_displays(items)

    all_displays = transcript._all_displays
    monkeypatch.setattr(transcript, "_all_displays", count_walked)
    view = style(page, [0, 1], LIMIT)
    for number in range(1000):
        view.display(0, {"text/plain": str(number)}, {}, f"display {number}")
        view.update(0, {"text/plain": f"changed {number}"}, {}, f"display {number // 2}")
    assert walked < 10
    shown = plain_of(view.section(0).items).splitlines()
    assert shown[:2] == ["changed 1", "changed 3"] and shown[-1] == "999"


def test_displays_are_found_after_each_kind_of_change() -> None:
    shown = RankTranscript(LIMIT)
    shown.display({"text/plain": "1"}, display_id="one")
    shown.display({WIDGET: {"model_id": "m"}}, display_id="two", below=True)
    assert [item.display_id for item in shown.below] == ["two"]
    assert shown.update({"text/plain": "2"}, None, "one", below=True)
    assert [item.display_id for item in shown.below] == ["one", "two"]
    shown.close_widget("m")
    assert [item.display_id for item in shown.below] == ["one"] and not shown.update({}, None, "two")
    shown.clear(wait=True)
    assert shown.update({"text/plain": "3"}, None, "one")
    shown.display({"text/plain": "4"}, display_id="three")
    assert not shown.update({}, None, "one") and shown.below == []
    shown.add_area("area")
    shown.display({WIDGET: {"model_id": "area"}})
    shown.capture("area", True)
    shown.display({"text/plain": "5"}, display_id="four", below=True)
    shown.capture("area", False)
    shown.display({"text/plain": "6"}, display_id="five", below=True)
    assert [item.display_id for item in shown.below] == ["four", "five"] and shown.update({}, None, "four")
    shown.clear(wait=False)
    assert shown.below == [] and not shown.update({}, None, "five")


def test_an_output_widget_captures_until_capturing_is_switched_off() -> None:
    shown = RankTranscript(LIMIT)
    shown.add_area("w")
    shown.capture("w", True)
    shown.text("stdout", "inside\n", None)
    shown.display({"text/plain": "d"}, None, "id")
    shown.capture("w", False)
    shown.text("stdout", "outside\n", None)
    assert plain_of(shown.items) == "outside"
    shown.display({WIDGET: {"model_id": "w"}})
    shown.display({WIDGET: {"model_id": "w"}})  # shown once
    assert plain_of(shown.items) == "outside\ninside\nd"
    assert shown.update({"text/plain": "e"}, {}, "id") and plain_of(shown.items).endswith("e")
    assert not shown.update({}, {}, "nobody's")
    assert shown.is_area("w")
    shown.drop_area("w")
    assert not shown.is_area("w")


# -- labels


def test_labelled_bars_of_several_ranks_are_one_display(page: Page) -> None:
    view = Labels(page, LIMIT)  # type: ignore[arg-type]
    write_texts(view, "\r 10%", "\r 20%", stream="stderr")
    view.draw()
    assert page.plain == ["[rank 0]  10%\n[rank 1]  20%"]
    write_texts(view, "\r100%\n", "\r 90%", stream="stderr")
    write_texts(view, "done\n", stream="stderr")
    view.ended(1, False)
    view.close({}, "")
    assert "[rank 0] 100%" in "\n".join(page.plain) + page.text
    assert "[rank 1]  90%" in "\n".join(page.plain) + page.text
    assert "[rank 0] done\n" in page.text


def test_labelled_bars_stay_in_the_order_of_their_ranks(page: Page) -> None:
    view = Labels(page, LIMIT)  # type: ignore[arg-type]
    view.text(1, "stderr", "\r 20%", None)
    view.text(0, "stderr", "\r 10%", None)
    view.draw()
    assert page.plain == ["[rank 0]  10%\n[rank 1]  20%"]


@pytest.mark.parametrize("terminal", [True, False])
def test_text_that_moves_up_overwrites_its_lines(page: Page, terminal: bool) -> None:
    page.rich, page.terminal = False, terminal
    view = Labels(page, LIMIT)  # type: ignore[arg-type]
    view.text(0, "stdout", "old\n\x1b[Anew\n", None)
    view.close({}, "")
    assert page.text.endswith("new\n") and "old" not in page.text and page.plain == []


def test_text_after_a_bar_begins_the_next_line(page: Page) -> None:
    page.rich = False
    view = Labels(page, LIMIT)  # type: ignore[arg-type]
    view.text(0, "stdout", "\r 50%\r100%\n    \x1b[32m", None)
    view.text(0, "stdout", "loss 0.1\n", None)
    view.close({}, "")
    assert page.text == "[rank 0] 100%\n[rank 0]     \x1b[32mloss 0.1\n"


def test_unfinished_lines_are_shown_at_the_end_with_stdout_first(page: Page) -> None:
    view = Labels(page, LIMIT)  # type: ignore[arg-type]
    view.text(0, "stderr", "warned", None)
    view.text(0, "stdout", "said", None)
    view.close({}, "")
    assert page.text == "[rank 0] said\n[rank 0] warned\n"


def test_labelled_displays_have_their_rank(page: Page) -> None:
    view = Labels(page, LIMIT)  # type: ignore[arg-type]
    view.display(1, PICTURE, {}, "x")
    view.update(1, {"text/plain": "changed"}, {}, "x")
    view.result(0, 3, {"text/plain": "7"}, {})
    view.clear(0, False)
    view.close({}, "")
    assert page.plain == ["changed", "Out[0:3]: 7"] and "[rank 1]" in page.text
    assert page.cleared == []


def test_labelled_values_appear_at_the_end_in_rank_order(page: Page) -> None:
    view = Labels(page, LIMIT)  # type: ignore[arg-type]
    view.result(1, 5, {"text/plain": "b"}, {})
    view.result(0, 5, {"text/plain": "a"}, {})
    view.draw()
    assert page.plain == []
    view.result(0, 5, {"text/plain": "more"}, {})  # each line of a cell may show a result
    assert page.plain == ["Out[0:5]: a"]
    view.close({}, "")
    assert page.plain == ["Out[0:5]: a", "Out[0:5]: more", "Out[1:5]: b"]
    view.result(1, 5, {"text/plain": "late"}, {})
    assert page.plain[-1] == "Out[1:5]: late"


def test_a_labelled_bar_that_wipes_itself_out_leaves_no_label(page: Page) -> None:
    view = Labels(page, LIMIT)  # type: ignore[arg-type]
    write_texts(view, "\r 10%", "\r 20%", stream="stderr")
    view.draw()
    write_texts(view, "\r    \r", "\r    \r", stream="stderr")
    view.close({}, "")
    assert visible_texts(page) == [] and page.text == ""


def test_the_label_of_a_widget_disappears_with_it(page: Page) -> None:
    view = Labels(page, LIMIT)  # type: ignore[arg-type]
    view.display(1, widget_data("bar"), {}, None)
    assert visible_texts(page) == ["[rank 1]", "bar"]
    view.widget_closed(1, "bar")
    assert visible_texts(page) == []
