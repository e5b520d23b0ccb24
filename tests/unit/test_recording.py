"""What a cell has shown, kept so that it can be shown again."""

from __future__ import annotations

from typing import Any

from ddip.output.cells.recording import MOST_TEXT, OVERHEAD, Recording, trim


def stream(text: str, name: str = "stdout", **where: int) -> dict[str, Any]:
    return {"header": {"msg_type": "stream"}, "content": {"name": name, "text": text, **where}}


def display(text: str, name: str | None = None, kind: str = "display_data") -> dict[str, Any]:
    content = {"data": {"text/plain": text}, "metadata": {}, "transient": {} if name is None else {"display_id": name}}
    return {"header": {"msg_type": kind}, "content": content}


def clear(wait: bool) -> dict[str, Any]:
    return {"header": {"msg_type": "clear_output"}, "content": {"wait": wait}}


def kept(recording: Recording) -> list[tuple[int, str]]:
    """By rank, what the messages say."""
    return [
        (rank, message["content"].get("text") or message["content"]["data"]["text/plain"])
        for rank, message in recording.messages()
    ]


def test_text_that_follows_text_is_one_message() -> None:
    recording = Recording()
    for part in ("a", "b\n", "c"):
        recording.add(0, stream(part))
    recording.add(1, stream("d"))
    recording.add(0, stream("e", "stderr"))
    assert kept(recording) == [(0, "ab\nc"), (1, "d"), (0, "e")]


def test_the_last_version_of_an_updated_display_is_kept() -> None:
    recording = Recording()
    recording.add(0, display("0 %", "bar"))
    for percent in range(1, 101):
        recording.add(0, display(f"{percent} %", "bar", "update_display_data"))
        recording.add(1, display(f"rank 1: {percent} %", "bar", "update_display_data"))
    assert kept(recording) == [(0, "0 %"), (0, "100 %"), (1, "rank 1: 100 %")]


def test_long_output_keeps_its_beginning_and_its_last_end() -> None:
    recording = Recording()
    recording.add(0, stream("begin\n"))
    for line in range(1000, 1100, 10):
        recording.add(0, stream(f"line {line}\n", line=line, cut=0))
        recording.add(1, display("between"))
        recording.add(0, stream(f"line {line + 1}\n"))
    assert [text for rank, text in kept(recording) if rank == 0] == ["begin\n", "line 1090\n", "line 1091\n"]


def test_cleared_output_is_dropped_and_a_redrawn_plot_kept_once() -> None:
    recording = Recording()
    recording.add(1, stream("of another rank"))
    for number in range(50):
        recording.add(0, display(f"plot {number}"))
        recording.add(0, clear(wait=True))
    assert kept(recording) == [(1, "of another rank"), (0, "plot 49")]
    recording.add(0, clear(wait=False))
    assert kept(recording) == [(1, "of another rank")]


def test_output_in_an_output_widget_does_not_trigger_pending_clears() -> None:
    recording = Recording()
    recording.add(0, stream("kept until more comes"))
    recording.add(0, clear(wait=True))
    recording.add(0, display("in the widget"), captured=True)
    assert kept(recording) == [(0, "kept until more comes"), (0, "in the widget")]


def test_a_clear_within_an_output_widget_clears_nothing_else() -> None:
    recording = Recording()
    recording.add(0, stream("before"))
    recording.add(0, clear(wait=False), captured=True)
    assert kept(recording) == [(0, "before")]


def test_too_much_output_drops_the_oldest() -> None:
    first, second = Recording(), Recording()
    for recording in (first, second):
        for number in range(10):
            recording.add(0, display(str(number) * 1000))
    trim([first, second], 15 * (1000 + OVERHEAD))
    assert (len(kept(first)), first.left_out, len(kept(second)), second.left_out) == (5, 5, 10, 0)
    trim([first, second], 0)
    assert first.size == second.size == 0
    assert kept(first) == kept(second) == []


def test_a_running_cell_keeps_no_more_than_the_limit() -> None:
    recording = Recording()
    recording.most = 3000
    for number in range(100):
        recording.add(0, display(f"{number:4}" * 100))
    assert recording.size <= 3000
    assert kept(recording)[-1] == (0, "  99" * 100)
    assert recording.left_out == 100 - len(kept(recording))


def test_long_text_drops_its_beginning() -> None:
    recording = Recording()
    recording.most = 3 * MOST_TEXT
    for number in range(50_000):
        recording.add(0, stream(f"{number:99}\n"))
    assert recording.size <= recording.most
    text = "".join(part for _, part in kept(recording))
    assert len(text) > 2 * MOST_TEXT and text.endswith(f"{49_999:99}\n")
    assert recording.left_out == 3
