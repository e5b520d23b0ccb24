"""Widgets of several ranks, and plots that need a script: placement below the tabs, and later callbacks."""

from __future__ import annotations

import re
from typing import Any

import ipywidgets
import pytest

from .notebook import Messages, Notebook, Shown
from .variants import few

PLOTLY = "application/vnd.plotly.v1+json"
VIEW = "application/vnd.jupyter.widget-view+json"


def is_place(bundle: dict[str, Any]) -> bool:
    """Return True for an element that a Bokeh script fills."""
    return "data-root-id" in bundle.get("text/html", "")


def page_of(shown: Shown) -> list[str]:
    """Return the visible outputs in words; ``script`` is an output that shows nothing by itself."""
    lines = []
    for bundle in shown.outputs:
        html = bundle.get("text/html", "")
        if any(part in html for part in ("ddip-ranks", "<label", 'class="ddip"')):
            lines.append("tabs")
        elif PLOTLY in bundle:
            lines.append(bundle[PLOTLY]["data"][0]["name"])
        elif is_place(bundle):
            lines.append("place")
        elif bundle.get("text/plain"):
            lines.append(re.sub(r"Out\[[\d:]+\]", "Out", bundle["text/plain"]))
        elif "ddip-gone" not in html:
            lines.append("script")
    return lines


def captured_texts(messages: Messages) -> dict[str, str]:
    """Return the captured text of each Output widget; empty while a capture is unfinished.

    A widget captures what comes between the two messages that set and clear its ``msg_id``. After the end of the cell,
    its state holds all output.
    """
    texts: dict[str, str] = {}
    captures: list[str] = []
    for kind, content in messages:
        state = content["data"].get("state", {}) if kind == "comm_msg" else {}
        if state.get("msg_id"):
            captures.append(content["comm_id"])
        elif "outputs" in state:
            texts[content["comm_id"]] = "".join(output["text"] for output in state["outputs"])
        elif "msg_id" in state:
            captures.remove(content["comm_id"])
        elif captures:
            assert len(captures) == 1 and kind != "update_display_data"  # a widget does not capture updates
            if kind == "clear_output":
                texts[captures[-1]] = ""
            texts[captures[-1]] = texts.get(captures[-1], "") + str(content.get("text", ""))
    return {} if captures else texts


def widgets_of_model(shown: Shown, model: str) -> list[str]:
    """Return the names of the widgets of this model on the page, in rank order."""
    views = [bundle[VIEW]["model_id"] for bundle in shown.outputs if VIEW in bundle]
    states: dict[str, dict[str, Any]] = {}
    for kind, content in shown.messages:
        if kind in ("comm_open", "comm_msg"):
            states.setdefault(content["comm_id"], {}).update(content["data"].get("state", {}))
    found: list[str] = []
    for view in views:
        names = [view, *(child.removeprefix("IPY_MODEL_") for child in states[view].get("children", ()))]
        found += [name for name in names if states[name]["_model_name"] == model]
    return found


def move_slider(notebook: Notebook, slider: str, value: int) -> None:
    """Send what the page sends when a person moves a slider."""
    notebook.send_comm(slider, {"method": "update", "state": {"value": value}, "buffer_paths": []})


def click_button(notebook: Notebook, button: str) -> None:
    """Send what the page sends when a person clicks a button."""
    notebook.send_comm(button, {"method": "custom", "content": {"event": "click"}})


@pytest.fixture(params=few(["tabs", "labels", "grouped"], "tabs"))
def style(request: pytest.FixtureRequest, notebook: Notebook) -> Any:
    """Set each style of output."""
    notebook.ok(f"%config DipMagics.style = {request.param!r}")
    yield request.param
    notebook.ok("%config DipMagics.style = 'auto'")


# -- callbacks


@pytest.mark.slow
def test_output_of_interact_is_below_the_slider_of_its_rank(notebook: Notebook, style: str) -> None:
    cell = notebook.begin(
        "%%dip -S all\nimport ipywidgets\nfrom tqdm import tqdm\ndef show(x):\n"
        "    for i in tqdm(range(x), file=sys.stdout): pass\n    print('x is', x, 'on', rank)\n"
        "import sys\nprint('beside')\nipywidgets.interact(show, x=5);"
    )
    shown = notebook.finish(cell)
    assert shown.status == "ok"
    sliders, outputs = widgets_of_model(shown, "IntSliderModel"), widgets_of_model(shown, "OutputModel")
    assert len(sliders) == len(outputs) == 3
    texts = captured_texts(shown.messages)
    assert all("100%" in texts[output] for output in outputs)
    ranks = [int(texts[output][-2]) for output in outputs]
    assert sorted(ranks) == [0, 1, 2] and (style == "labels" or ranks == [0, 1, 2])  # labels come in any order
    for number, rank in enumerate(ranks):
        assert texts[outputs[number]].endswith(f"x is 5 on {rank}\n")
        notebook.ok("%%dip -S all\nprint('another cell')")
        move_slider(notebook, sliders[number], 7 + rank)
        line = f"x is {7 + rank} on {rank}\n"
        late = notebook.late_messages(
            cell, lambda messages, line=line: line in "".join(captured_texts(messages).values())
        )
        assert list(captured_texts(late)) == [outputs[number]] and captured_texts(late)[outputs[number]].endswith(line)


@pytest.mark.grid
def test_callbacks_print_in_the_tab_of_their_rank(notebook: Notebook) -> None:
    cell = notebook.begin("""
        %%dip -S all
        import ipywidgets
        button, out, slider = ipywidgets.Button(), ipywidgets.Output(), ipywidgets.IntSlider()
        def click(_):
            print('clicked')
            with out: print('in its Output')
        button.on_click(click)
        slider.observe(lambda change: print('now', change['new']), 'value')
        display(out, button, slider)
    """)
    shown = notebook.finish(cell)
    buttons, sliders = widgets_of_model(shown, "ButtonModel"), widgets_of_model(shown, "IntSliderModel")
    assert page_of(shown)[0] == "[rank 0]"  # no tabs yet, because there is no text
    notebook.ok("%%dip -S all\nprint('another cell')")
    click_button(notebook, buttons[1])
    assert notebook.late(cell, "in its Output\nclicked").endswith(
        "── ranks 0, 2 ──\n\n── rank 1 ──\nin its Output\nclicked"
    )
    move_slider(notebook, sliders[2], 7)
    assert "── rank 2 ──\nnow 7" in notebook.late(cell, "now 7")
    other = notebook.begin("%%dip -S all\nwith out: print('from the next cell')\nprint('beside', rank)")
    assert "from" not in notebook.finish(other).text  # their Output widgets are in the other cell's tabs
    notebook.late(
        cell,
        "── rank 0 ──\nfrom the next cell\n── rank 1 ──\nin its Output\nfrom the next cell\nclicked\n"
        "── rank 2 ──\nfrom the next cell\nnow 7",
    )


def test_callbacks_print_next_to_their_widget(notebook: Notebook) -> None:
    """The widget was created in another cell that showed only rank 0."""
    made = notebook.begin(
        "%%dip\nimport ipywidgets\nslider = ipywidgets.IntSlider(3)\nbox = ipywidgets.VBox([slider])\n"
        "slider.value = 5\n"
        "slider.observe(lambda change: print('now', change['new'], 'on', rank), 'value')"
    )
    notebook.finish(made)
    cell = notebook.begin("%%dip -S all\nbox")
    shown = notebook.finish(cell)
    opened = {c["comm_id"]: c["data"]["state"] for kind, c in shown.messages if kind == "comm_open"}
    sliders = [name for name, state in opened.items() if state["_model_name"] == "IntSliderModel"]
    # The page already has rank 0's widget
    assert len(sliders) == 2 and {opened[name]["value"] for name in sliders} == {5}
    for number, slider in enumerate(sliders):
        move_slider(notebook, slider, 8 + number)
        assert re.search(rf"── rank \d ──\nnow {8 + number} on \d", notebook.late(cell, f"now {8 + number}"))
    update = notebook.ok("%%dip\nslider.value = 6").messages  # one cell updates all of them
    assert len({content["comm_id"] for kind, content in update if kind == "comm_msg"}) == 3


# -- a reloaded page


def answer_to(notebook: Notebook, request: str) -> dict[str, Any]:
    """Return the data of the comm message that answers a request."""
    messages = notebook.late_messages(request, lambda messages: "comm_msg" in [kind for kind, _ in messages])
    return next(content["data"] for kind, content in messages if kind == "comm_msg")  # type: ignore[no-any-return]


def values_on_new_page(notebook: Notebook, models: list[str]) -> list[Any]:
    """Return the values of widgets that a page gets when it is opened."""
    states = [answer_to(notebook, notebook.send_comm(name, {"method": "request_state"})) for name in models]
    assert [data["method"] for data in states] == ["update"] * len(models)
    values = [data["state"]["value"] for data in states]
    if int(ipywidgets.__version__.split(".")[0]) >= 8:
        together = answer_to(notebook, notebook.request_states())["states"]
        assert [together[name]["state"]["value"] for name in models] == values
    return values


@pytest.mark.slow
def test_a_reloaded_page_gets_widgets_of_busy_and_ended_ranks(notebook: Notebook) -> None:
    shown = notebook.ok("%%dip -S all\nimport ipywidgets\ndisplay(slider := ipywidgets.IntSlider(rank))")
    sliders = widgets_of_model(shown, "IntSliderModel")
    notebook.ok("%%dip -S all\nslider.value += 40")
    notebook.run("%%dip --bg\nimport time\nwhile True: time.sleep(0.01)")
    move_slider(notebook, sliders[1], 7)
    assert values_on_new_page(notebook, sliders) == [40, 7, 42]
    notebook.ok("%makedip -k")
    assert values_on_new_page(notebook, sliders) == [40, 7, 42]


COMMANDS = """%%dip -r 0
import ipywidgets, traitlets
class Commander(ipywidgets.DOMWidget):
    command = traitlets.Unicode().tag(sync=True)
fast_bar, commander = ipywidgets.IntProgress(max=2000), Commander()
display(fast_bar, commander)
for step in range(1, 2001):
    fast_bar.value = step
    if step % 500 == 0:
        commander.command = f"at {step}"
        commander.command = ""
fast_bar.value = 1
fast_bar.max = 3000
fast_bar.value = 3000
commander.command = "end"
"""


def test_values_that_a_page_has_not_got_yet_are_replaced_but_no_commands_are(notebook: Notebook) -> None:
    states = [
        content["data"].get("state", {}) for kind, content in notebook.ok(COMMANDS).messages if kind == "comm_msg"
    ]
    values = [state.get("value", state.get("command")) for state in states]
    assert len(values) < 400
    for step in (500, 1000, 1500, 2000):
        at = values.index(f"at {step}")
        assert values[at - 1 : at + 2] == [step, f"at {step}", ""]
    assert values[-4:] == [1, None, 3000, "end"]  # None: the message of another property


# -- bars


@pytest.mark.grid(in_ci=True)
def test_bars_of_tqdm_notebook_that_are_closed_leave_no_label(notebook: Notebook) -> None:
    code = """
        %%dip -S all
        from tqdm.auto import tqdm
        for i in tqdm(range(2), desc='outer', leave=KEEP):
            for j in tqdm(range(3), desc='inner', leave=False): pass
    """
    assert page_of(notebook.ok(code.replace("KEEP", "False"))) == []
    lines = [re.sub(":.*", "", line) for line in page_of(notebook.ok(code.replace("KEEP", "True")))]
    assert lines == ["[rank 0]", "outer", "[rank 1]", "outer", "[rank 2]", "outer"]


@pytest.mark.grid
@pytest.mark.parametrize("module", ["tqdm", "tqdm.auto"])
@pytest.mark.usefixtures("style")
def test_bars_that_wipe_themselves_out_leave_nothing(notebook: Notebook, module: str) -> None:
    code = f"%%dip -S all\nfrom {module} import tqdm\nfor i in tqdm(range(99), leave=False, mininterval=0): pass"
    shown = notebook.ok(code)
    assert page_of(shown) == [] and shown.stdout == "" and shown.stderr == ""
    assert "kept" in notebook.ok(f"{code}\nprint('kept')").text


def test_a_text_bar_has_the_colour_of_text(notebook: Notebook) -> None:
    code = "%%dip -S all\nimport sys\nfrom tqdm import tqdm\nfor i in tqdm(range(9)): pass"
    page = notebook.ok(code).data[-1]["text/html"]
    assert '<pre class="ddip-stdout">100%' in page and '<pre class="ddip-stderr">' not in page


# -- below the tabs


def test_widgets_are_below_the_tabs_and_labelled(notebook: Notebook) -> None:
    shown = notebook.ok("""
        %%dip -S all
        import ipywidgets
        print('text')
        ipywidgets.IntSlider(rank)
    """)
    label = "Out: " if int(ipywidgets.__version__.split(".")[0]) >= 8 else ""  # ipywidgets 7 displays itself
    lines = [line for rank in range(3) for line in (f"[rank {rank}]", f"{label}IntSlider(value={rank})")]
    assert page_of(shown) == ["tabs", "tabs", "tabs", *lines] and shown.stdout == ""


IN_TURN = "for turn in (2, 1, 0):\n    if turn == rank: SHOW\n    dist.barrier()"


@pytest.mark.grid
def test_plotly_plots_are_below_the_tabs_by_rank(notebook: Notebook) -> None:
    notebook.ok("%%dip\nimport torch.distributed as dist\nimport plotly.graph_objects as go")
    figure = "go.Figure(go.Scatter(y=[rank, 2], name=f'{rank} NAME'))"
    first = IN_TURN.replace("SHOW", f"{figure}.show('plotly_mimetype+notebook')").replace("NAME", "first")
    second = f"{figure.replace('NAME', 'second')}.show('plotly_mimetype')"
    shown = notebook.ok(f"%%dip -S all\n{first}\nprint('text')\n{second}")
    # the first plot includes Plotly's script
    lines = [[f"[rank {rank}]", "script", f"{rank} first", f"{rank} second"] for rank in range(3)]
    assert page_of(shown) == ["tabs", "tabs", "tabs", *sum(lines, [])]


@pytest.mark.grid
def test_bokeh_plots_are_below_the_tabs_by_rank(notebook: Notebook) -> None:
    code = "import torch.distributed as dist\nimport bokeh.io\nfrom bokeh.plotting import figure, show"
    loaded = notebook.ok(f"%%dip -S all\n{code}\nbokeh.io.output_notebook(hide_banner=True)")
    assert page_of(loaded) == ["script"] * 3  # the script that loads Bokeh is invisible
    plot = "plot = figure(width=200, height=200)\nplot.line([1, 2], [rank, 3])"
    shown = notebook.ok(f"%%dip -S all\n{plot}\n{IN_TURN.replace('SHOW', 'show(plot)')}")
    assert page_of(shown) == [line for rank in range(3) for line in (f"[rank {rank}]", "place", "script")]
    places = [re.findall(r'id="([^"]+)"', bundle["text/html"])[0] for bundle in shown.outputs if is_place(bundle)]
    scripts = [bundle["application/javascript"] for bundle in shown.outputs if "application/javascript" in bundle]
    assert [place in script for place, script in zip(places, scripts, strict=True)] == [True] * 3


# -- -S all -r 1


def test_the_tab_of_a_running_rank_is_selected(notebook: Notebook) -> None:
    shown = notebook.ok("%%dip -S all -r 1\nprint('only', rank)")
    assert shown.data[-1]["text/plain"] == "── ranks 0, 2 ──\n\n── rank 1 ──\nonly 1"
    labels, page = (bundle["text/html"] for bundle in shown.data[-2:])
    (opened,) = re.findall(r":checked\)\) #\S+ #(\S+)\{display:block\}", labels)
    assert re.findall(f'id="{opened}"[^>]*>(.*?)</div>', page, re.DOTALL) == ['<pre class="ddip-stdout">only 1\n</pre>']


def test_ranks_outside_the_cell_are_not_shown_as_running(notebook: Notebook) -> None:
    cell = notebook.begin(
        "%%dip -S all -r 1\nimport time\nprint('text')\n"
        "display({'application/x-odd': 1, 'text/plain': 'odd'}, raw=True)\nwhile True: time.sleep(0.01)"
    )
    shown = notebook.finish(cell, until="odd")
    if "── rank 1 ──" not in shown.text:  # the tabs are redrawn with the next message, or after a pause
        drawn = notebook.finish(cell, until="── rank 1 ──")
        shown.messages, shown.data = shown.messages + drawn.messages, shown.data + drawn.data
    labels = [bundle["text/html"] for bundle in shown.data if "<label" in bundle.get("text/html", "")]
    notebook.interrupt()
    ended = notebook.finish(cell)
    shown.messages += ended.messages
    assert ended.error == "CellInterrupted" and page_of(shown) == ["tabs", "tabs", "tabs", "[rank 1]", "odd"]
    assert labels and all(page.count('<label class="ddip-rank ddip-runs"') == 1 for page in labels)
