"""The recorded output of a cell, which can be shown again."""

from __future__ import annotations

from typing import Any

from ddip.output.cells.recording import MOST_TEXT, OVERHEAD, Recording, trim_recordings


def stream_message(text: str, name: str = "stdout", **where: int) -> dict[str, Any]:
    return {"header": {"msg_type": "stream"}, "content": {"name": name, "text": text, **where}}


def display_message(text: str, name: str | None = None, kind: str = "display_data") -> dict[str, Any]:
    content = {"data": {"text/plain": text}, "metadata": {}, "transient": {} if name is None else {"display_id": name}}
    return {"header": {"msg_type": kind}, "content": content}


def clear_message(wait: bool) -> dict[str, Any]:
    return {"header": {"msg_type": "clear_output"}, "content": {"wait": wait}}


def recorded_texts(recording: Recording) -> list[tuple[int, str]]:
    """Return the texts of the recorded messages, with their ranks."""
    return [
        (rank, message["content"].get("text") or message["content"]["data"]["text/plain"])
        for rank, message in recording.messages()
    ]


def test_text_that_follows_text_is_one_message() -> None:
    recording = Recording()
    for part in ("a", "b\n", "c"):
        recording.add(0, stream_message(part))
    recording.add(1, stream_message("d"))
    recording.add(0, stream_message("e", "stderr"))
    assert recorded_texts(recording) == [(0, "ab\nc"), (1, "d"), (0, "e")]


def test_the_last_version_of_an_updated_display_is_kept() -> None:
    recording = Recording()
    recording.add(0, display_message("0 %", "bar"))
    for percent in range(1, 101):
        recording.add(0, display_message(f"{percent} %", "bar", "update_display_data"))
        recording.add(1, display_message(f"rank 1: {percent} %", "bar", "update_display_data"))
    assert recorded_texts(recording) == [(0, "0 %"), (0, "100 %"), (1, "rank 1: 100 %")]


def test_long_output_keeps_its_beginning_and_its_last_end() -> None:
    recording = Recording()
    recording.add(0, stream_message("begin\n"))
    for line in range(1000, 1100, 10):
        recording.add(0, stream_message(f"line {line}\n", line=line, cut=0))
        recording.add(1, display_message("between"))
        recording.add(0, stream_message(f"line {line + 1}\n"))
    assert [text for rank, text in recorded_texts(recording) if rank == 0] == ["begin\n", "line 1090\n", "line 1091\n"]


def test_cleared_output_is_dropped_and_a_redrawn_plot_kept_once() -> None:
    recording = Recording()
    recording.add(1, stream_message("of another rank"))
    for number in range(50):
        recording.add(0, display_message(f"plot {number}"))
        recording.add(0, clear_message(wait=True))
    assert recorded_texts(recording) == [(1, "of another rank"), (0, "plot 49")]
    recording.add(0, clear_message(wait=False))
    assert recorded_texts(recording) == [(1, "of another rank")]


def test_output_in_an_output_widget_does_not_trigger_pending_clears() -> None:
    recording = Recording()
    recording.add(0, stream_message("kept until more comes"))
    recording.add(0, clear_message(wait=True))
    recording.add(0, display_message("in the widget"), captured=True)
    assert recorded_texts(recording) == [(0, "kept until more comes"), (0, "in the widget")]


def test_a_clear_within_an_output_widget_clears_nothing_else() -> None:
    recording = Recording()
    recording.add(0, stream_message("before"))
    recording.add(0, clear_message(wait=False), captured=True)
    assert recorded_texts(recording) == [(0, "before")]


def test_too_much_output_drops_the_oldest() -> None:
    first, second = Recording(), Recording()
    for recording in (first, second):
        for number in range(10):
            recording.add(0, display_message(str(number) * 1000))
    trim_recordings([first, second], 15 * (1000 + OVERHEAD))
    assert (len(recorded_texts(first)), first.left_out, len(recorded_texts(second)), second.left_out) == (5, 5, 10, 0)
    trim_recordings([first, second], 0)
    assert first.size == second.size == 0
    assert recorded_texts(first) == recorded_texts(second) == []


def test_a_running_cell_keeps_no_more_than_the_limit() -> None:
    recording = Recording()
    recording.most = 3000
    for number in range(100):
        recording.add(0, display_message(f"{number:4}" * 100))
    assert recording.size <= 3000
    assert recorded_texts(recording)[-1] == (0, "  99" * 100)
    assert recording.left_out == 100 - len(recorded_texts(recording))


def test_long_text_drops_its_beginning() -> None:
    recording = Recording()
    recording.most = 3 * MOST_TEXT
    for number in range(50_000):
        recording.add(0, stream_message(f"{number:99}\n"))
    assert recording.size <= recording.most
    text = "".join(part for _, part in recorded_texts(recording))
    assert len(text) > 2 * MOST_TEXT and text.endswith(f"{49_999:99}\n")
    assert recording.left_out == 3
