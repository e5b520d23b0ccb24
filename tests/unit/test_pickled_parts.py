"""Variables of a save are read one by one, also after one that cannot be unpickled."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections import OrderedDict
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

from ddip.rank.saves.pickled_parts import PickledParts


class Fails:
    """An object that cannot be unpickled; `parts` are pickled with it."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return fail, self.parts


def fail(*parts: Any) -> None:
    """Raise OSError."""
    raise OSError("no such server")


calls: list[str] = []


class Counts:
    """An object that is unpickled by `count`."""

    def __reduce__(self) -> Any:
        return count, ("text",)


def count(text: str) -> None:
    """Add `text` to `calls`."""
    calls.append(text)


def pickled_parts(variables: dict[str, Any]) -> PickledParts:
    """Return `variables`, pickled with one memo."""
    file, sizes, buffers, given = io.BytesIO(), dict[str, int](), dict[str, list[Any]](), list[Any]()
    pickler = cloudpickle.Pickler(file, protocol=5, buffer_callback=given.append)
    for name, value in variables.items():
        begin, first = file.tell(), len(given)
        pickler.dump(value)
        sizes[name], buffers[name] = file.tell() - begin, [buffer.raw() for buffer in given[first:]]
    return PickledParts(file.getvalue(), sizes, buffers)


def load_all(variables: dict[str, Any]) -> dict[str, Any]:
    """Return what each of `variables` is after pickling, or the error as text."""
    parts, found = pickled_parts(variables), dict[str, Any]()
    for name in variables:
        try:
            found[name] = parts.load(name)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_later_variables_are_read_after_a_failure() -> None:
    early, late = ["early"], ["late"]
    found = load_all({"a": early, "b": Fails(["own"], early), "c": [early, late], "d": [late, early], "e": {"x": 1}})
    assert found["b"] == "OSError: no such server"
    assert (found["c"], found["d"], found["e"]) == ([["early"], ["late"]], [["late"], ["early"]], {"x": 1})
    assert found["c"][0] is found["a"] is found["d"][1] and found["c"][1] is found["d"][0]


def test_what_holds_a_part_of_a_failed_variable_fails_too() -> None:
    part = ["part"]
    found = load_all({"a": Fails(part), "b": [part, "more"], "c": ["own"], "d": [part], "e": [1, ["fine"]]})
    assert found["b"] == found["d"] == "ValueError: it holds a part of a"
    assert (found["c"], found["e"]) == (["own"], [1, ["fine"]])


def test_texts_functions_classes_and_modules_are_found_after_a_failure() -> None:
    shared = "".join(["te", "xt"])
    own = ["own"]
    found = load_all(
        {
            "a": Fails(shared, fail, OrderedDict, os, own),
            "b": [shared, os],
            "c": OrderedDict(x=fail),
            "d": [shared, {os: OrderedDict}],
            "e": [own, os],
        }
    )
    assert found["b"] == ["text", os] and found["c"] == OrderedDict(x=fail)
    assert found["d"] == ["text", {os: OrderedDict}]
    assert found["e"] == "ValueError: it holds a part of a"


def test_only_users_of_a_lost_module_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: Any = ModuleType("lost_module")
    monkeypatch.setitem(sys.modules, "lost_module", lost)
    exec("class Lost: pass", vars(lost))
    parts = pickled_parts({"a": lost, "b": [lost.Lost()], "c": os, "d": lost.Lost, "e": [os, "lost_module"]})
    monkeypatch.delitem(sys.modules, "lost_module")
    for name in "abd":
        with pytest.raises((ImportError, ValueError), match="lost_module|a part of"):
            parts.load(name)
        if name == "b":
            assert parts.load("c") is os
    assert parts.load("e") == [os, "lost_module"]


def test_a_function_of_a_failed_variable_is_not_called_again() -> None:
    made = Counts()
    found = load_all({"a": Fails(made), "b": [made], "c": Fails("text"), "d": ["text"]})
    assert (found["b"], found["d"]) == ("ValueError: it holds a part of a", ["text"])
    assert calls == ["text"]


@pytest.mark.parametrize("before", [0, 300])
def test_buffers_belong_to_their_variable(before: int) -> None:
    filler = {f"v{i}": [f"text {i}"] for i in range(before)}
    big = [pickle.PickleBuffer(bytearray(f"buffer {i}".encode())) for i in range(3)]
    found = load_all({**filler, "a": big[0], "b": Fails(big[1]), "c": big[2], "d": "end"})
    assert bytes(found["a"]) == b"buffer 0" and bytes(found["c"]) == b"buffer 2" and found["d"] == "end"
