"""The text of bars that are widgets, derived from widget messages."""

from __future__ import annotations

from typing import Any

import pytest

from ddip.output import widgets
from ddip.output.transcript import WIDGET
from ddip.output.widgets import WidgetBars


def widget_view(model: str, text: str = "0%") -> dict[str, Any]:
    return {WIDGET: {"model_id": model}, "text/plain": text}


def new_bar(bars: WidgetBars, name: str, **state: Any) -> str | None:
    """Create and display a bar as tqdm does; return the display ID."""
    bars.open(f"{name}-left", {"_model_name": "HTMLModel", "value": ""})
    bars.open(f"{name}-bar", {"_model_name": "FloatProgressModel", "min": 0.0, "max": 10.0, "value": 0.0, **state})
    bars.open(f"{name}-right", {"_model_name": "HTMLModel", "value": ""})
    children = [f"IPY_MODEL_{name}-{part}" for part in ("left", "bar", "right")]
    bars.open(name, {"_model_name": "HBoxModel", "children": children})
    return bars.display(None, 0, widget_view(name), {})


def test_the_text_matches_the_widgets() -> None:
    bars = WidgetBars()
    display_id = new_bar(bars, "b")
    assert bars.take_changed() == []
    bars.change("b-left", {"value": "\u2007<b>a</b> &lt;\u200745%"})
    bars.change("b-bar", {"value": 4.5})
    bars.change("b-right", {"value": "\u20074/10"})
    (bar,) = bars.take_changed()
    assert bar.display_id == display_id and bar.data == widget_view("b", " a < 45%|████▌     | 4/10")
    bars.change("b-bar", {"value": 4.51, "bar_style": "danger"})
    assert bars.take_changed() == []  # the text has not changed


def test_a_closed_bar_is_neither_text_nor_widget() -> None:
    bars = WidgetBars()
    new_bar(bars, "b")
    bars.change("b-bar", {"value": 10})
    bars.close("b")
    (bar,) = bars.take_changed()
    assert bar.data == {"text/plain": ""}
    bars.change("b-bar", {"value": 0})
    bars.close("b")
    assert bars.take_changed() == [] and bars._models == bars._within == {}


@pytest.mark.parametrize("state", [{"min": None}, {"max": "x"}, {"value": None}, {"max": 0}])
def test_odd_widget_states_are_accepted(state: dict[str, Any]) -> None:
    bars = WidgetBars()
    new_bar(bars, "b", **state)
    bars.change("b-right", {"value": None})
    bars.change("nobody", {"value": 1})
    bars.close("nobody")
    assert bars.take_changed()[0].data["text/plain"].startswith("|")


@pytest.mark.parametrize(
    "data", [{}, {WIDGET: {}}, {WIDGET: None}, {WIDGET: {"model_id": 1}}, widget_view("slider"), widget_view("mixed")]
)
def test_a_widget_that_is_not_a_bar_stays_unchanged(data: dict[str, Any]) -> None:
    bars = WidgetBars()
    bars.open("slider", {"_model_name": "IntSliderModel", "value": 3})
    bars.open("load", {"_model_name": "IntProgressModel", "value": 3})
    bars.open("mixed", {"_model_name": "HBoxModel", "children": ["IPY_MODEL_load", "IPY_MODEL_slider"]})
    assert bars.display(None, 0, data, {}) is None
    bars.change("load", {"value": 5})
    assert bars.take_changed() == []


def test_several_bars_in_one_box_become_lines() -> None:
    bars = WidgetBars()
    for name, text in (("a", "first"), ("b", "")):
        bars.open(name, {"_model_name": "IntProgressModel", "max": 4, "value": 1, "description": text})
    bars.open("box", {"_model_name": "VBoxModel", "children": ["IPY_MODEL_a", "IPY_MODEL_b"]})
    assert bars.display(None, 0, widget_view("box"), {}) == bars.display(None, 0, widget_view("box"), {})
    bars.change("b", {"value": 4})
    assert bars.take_changed()[0].data["text/plain"] == "first |██▌       |\n|██████████|"


def test_a_long_notebook_keeps_the_bars_that_moved_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widgets, "KEPT_BARS", 3)
    monkeypatch.setattr(widgets, "KEPT_MODELS", 5)
    bars = WidgetBars()
    new_bar(bars, "outer")
    for number in range(20):
        new_bar(bars, f"b{number}")
        bars.open(f"text{number}", {"_model_name": "HTMLModel"})
        bars.change("outer-bar", {"value": number / 2})
        bars.take_changed()
    assert len(bars._shown) == 3 and "outer" in bars._shown and len(bars._models) == 3 * 4 + 5
