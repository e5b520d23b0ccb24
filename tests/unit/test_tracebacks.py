"""Reports of exceptions: complete if possible, never empty, and in bounded time."""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import pytest
from IPython.core.ultratb import VerboseTB

from ddip.rank.runtime import tracebacks
from ddip.rank.runtime.tracebacks import CHARACTERS, ErrorText, format_error


def exception_of(code: str, **names: Any) -> BaseException:
    """Return the exception that `code` raises."""
    try:
        exec(code, names)
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


def tell_in_time(error: BaseException, rich: Any = None) -> ErrorText:
    began = time.process_time(), time.monotonic()
    report = format_error(error, rich)
    assert time.process_time() < began[0] + 3 * tracebacks.SECONDS
    assert time.monotonic() < began[1] + 20  # ten times what an idle machine needs
    assert sum(map(len, report.traceback)) <= CHARACTERS
    return report


def test_the_rich_traceback_is_used_if_available() -> None:
    assert format_error(exception_of("1 / 0"), lambda: ["rich"]) == ErrorText(
        "ZeroDivisionError", "division by zero", ["rich"]
    )


def test_python_tracebacks_omit_the_frames_ipython_tracebacks_omit() -> None:
    code = "def between():\n    __tracebackhide__ = True\n    inner()\ndef inner():\n    1 / 0\nbetween()"
    ours, users = (format_error(exception_of(code, __name__=name), None).traceback for name in ("ddip.apps.toy", "toy"))
    assert "in between" not in "".join(ours) and "in inner" in "".join(ours)
    assert "in between" in "".join(users)


def test_an_interrupted_print_ends_in_code_of_the_user() -> None:
    """An interrupt mostly lands in the code below ``print``, which the user has not called."""
    for kind, shows_output_path in ((KeyboardInterrupt, False), (OSError, True)):
        stdlib: dict[str, Any] = {"__name__": "threading", "error": kind()}
        exec("def wait(): raise error", stdlib)
        stream: dict[str, Any] = {"__name__": "ddip.rank.streams.streams", "below": stdlib["wait"]}
        exec("def write_stream(): below()", stream)
        error = exception_of("def users(): below()\nusers()", __name__="__main__", below=stream["write_stream"])
        text = "".join(format_error(error, None).traceback)
        assert "in users" in text and ("in write_stream" in text) == ("in wait" in text) == shows_output_path


def test_a_frame_with_a_file_but_no_module_is_recognized() -> None:
    """So are those of pyzmq's compiled code since Python 3.12."""
    compiled: dict[str, Any] = {"error": KeyboardInterrupt()}
    exec(compile("def send(): raise error", "zmq/backend/cython/_zmq.py", "exec"), compiled)
    stream: dict[str, Any] = {"__name__": "ipykernel.iostream", "below": compiled["send"]}
    exec("def flush(): below()", stream)
    error = exception_of("def users(): below()\nusers()", __name__="__main__", below=stream["flush"])
    text = "".join(format_error(error, None).traceback)
    assert "in users" in text and "in send" not in text and "in flush" not in text


@pytest.mark.parametrize(
    "rich",
    [lambda: time.sleep(1000), lambda: 1 / 0, lambda: [3], lambda: ["x" * (CHARACTERS + 1)], lambda: sys.exit(), None],
    ids=["sleeps", "raises", "no text", "too long", "exits", "none"],
)
def test_the_python_traceback_replaces_a_missing_ipython_traceback(rich: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracebacks, "WAIT_SECONDS", 0.5)
    report = tell_in_time(exception_of("def f():\n    raise ValueError('why')\nf()"), rich)
    if rich is None or "3" not in str(report.traceback):
        assert report.traceback[1].split() == ["ValueError", "Traceback", "(most", "recent", "call", "last)"]
        assert any("line 2, in f" in line for line in report.traceback) and report.traceback[-1] == "ValueError: why"
    assert report.message == "why" and report.whole


def test_a_traceback_that_takes_cpu_time_is_abandoned() -> None:
    assert tell_in_time(exception_of("1 / 0"), lambda: sum(i for i in range(10**12))).traceback[-1] == (
        "ZeroDivisionError: division by zero"
    )


@pytest.mark.parametrize("body", ["time.sleep(1000)", "while True: pass"])
def test_a_slow_error_text_is_not_waited_for(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracebacks, "WAIT_SECONDS", 0.5)
    error = exception_of(f"class Odd(Exception):\n    def __str__(self):\n        {body}\nraise Odd", time=time)
    report = tell_in_time(error, lambda: ["never asked"])
    assert report.traceback[-1] == "Odd: (no text: its __str__ takes too long)" and not report.whole


def test_an_error_whose_text_raises_says_so() -> None:
    report = format_error(
        exception_of("class Odd(Exception):\n    def __str__(self): raise TypeError\nraise Odd"), None
    )
    assert report.message == "(it has no text: its __str__ raised TypeError)"


@pytest.mark.grid(in_ci=True)
def test_a_text_of_a_gigabyte_is_cut() -> None:
    report = tell_in_time(ValueError("x" * 10**9))
    assert report.message.endswith("(1,000,000,000 characters)") and len(report.message) < 11_000 and not report.whole


def test_a_long_chain_shows_both_ends() -> None:
    error: BaseException | None = None
    for number in range(20_000):
        link = ValueError(number)
        link.__cause__ = error
        error = link
    assert error is not None
    lines = "\n".join(tell_in_time(error, lambda: ["never asked"]).traceback)
    assert [number for number in (0, 1, 2, 3, 19_995, 19_996, 19_999) if f"ValueError: {number}\n" in lines + "\n"] == [
        *(0, 1, 2),
        *(19_996, 19_999),
    ]
    assert "[... 19,993 exceptions of this chain are left out ...]" in lines


def test_a_chain_in_a_circle_ends() -> None:
    one, two = ValueError("one"), KeyError("two")
    one.__cause__, two.__cause__ = two, one
    lines = tell_in_time(one).traceback
    assert lines.count("ValueError: one") == lines.count("KeyError: 'two'") == 1
    assert any("direct cause" in line for line in lines)


def test_a_suppressed_context_is_not_shown() -> None:
    code = "try: {}[1]\nexcept KeyError: raise ValueError"
    assert "KeyError" not in "".join(format_error(exception_of(f"{code} from None"), None).traceback)
    assert "During handling" in "".join(format_error(exception_of(code), None).traceback)


@pytest.mark.parametrize(
    "code", ["def f(n): f(n + 1)\nf(0)", "def f(n): g(n)\ndef g(n): f(n)\nf(0)"], ids=["of one", "of two"]
)
def test_a_recursion_shows_each_line_a_few_times(code: str) -> None:
    report = tell_in_time(exception_of(code))
    assert len(report.traceback) < 15 and any("frames are left out ...]" in line for line in report.traceback)


def test_many_frames_show_both_ends() -> None:
    code = "".join(f"def f{i}(): f{i + 1}()\n" for i in range(200)) + "def f200(): 1 / 0\nf0()"
    report = tell_in_time(exception_of(code))
    assert 40 < len(report.traceback) < 60 and "in f200" in report.traceback[-2]


def test_an_exception_group_shows_some_members() -> None:
    error = exception_of("raise ExceptionGroup('many', [ValueError(i) for i in range(5000)])")
    lines = tell_in_time(error, lambda: ["never asked"]).traceback
    assert "  ValueError: 4" in lines and "  ValueError: 5" not in lines and "  [... 4,995 more ...]" in lines


def test_a_line_of_megabytes_is_cut() -> None:
    assert tell_in_time(exception_of("1 / 0\n" + "#" * 5_000_000)).traceback
    syntax = tell_in_time(exception_of("x = '" + "y" * 5_000_000))
    assert len("".join(syntax.traceback)) < 20_000 and syntax.name == "SyntaxError"


def test_notes_are_shown_even_if_odd() -> None:
    error = exception_of("1 / 0")
    error.__notes__ = ["a note"] * 1000  # type: ignore[attr-defined]
    assert format_error(error, None).traceback.count("a note") == tracebacks.NOTES
    error.__notes__ = 3  # type: ignore[attr-defined]
    assert format_error(error, None).traceback[-1] == "ZeroDivisionError: division by zero"


def test_a_traceback_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", fail)
    assert format_error(exception_of("1 / 0"), None).traceback[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.grid(in_ci=True)
def test_sources_parsed_for_ipython_tracebacks_can_be_freed() -> None:
    pytest.importorskip("stack_data", reason="IPython 7 keeps no sources")
    import torch

    def count() -> int:
        gc.collect()
        return len(gc.get_objects())

    def fail(tb: VerboseTB) -> None:
        try:
            torch.nn.Linear(2, 2)(torch.ones(3))
        except RuntimeError as error:
            tb.structured_traceback(type(error), error, error.__traceback__)

    fail(VerboseTB())  # imports happen once
    tracebacks.forget_sources()
    gc.freeze()  # the collector then looks only at new objects
    try:
        fail(VerboseTB())
        assert count() > 10_000
        tracebacks.forget_sources()
        assert count() < 500
    finally:
        gc.unfreeze()
