"""Requests of programs to a kernel and their answers; who may ask, and which notebook is meant."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from ddip.notebook import for_programs
from ddip.notebook.for_programs import call, value_data
from ddip.protocol.status_types import ANSWER_MIME
from ddip.server import kernels, tokens
from ddip.server.kernels import KernelError, answer_in

# -- in the kernel


def answer_of(name: str, before: float | None = None, **arguments: Any) -> dict[str, Any]:
    """Return the kernel's answer."""
    answer: dict[str, Any] = json.loads(call(name, json.dumps(arguments), before)._repr_mimebundle_()[ANSWER_MIME])
    return answer


def test_without_ddip_status_shows_no_group_and_loads_nothing(shell: InteractiveShell) -> None:
    nothing = {"schema": 1, "group": None, "ranks": [], "devices": [], "cells": [], "errors": {}}
    assert answer_of("status", time.time() + 60) == {"ok": nothing}
    assert answer_of("shutdown") == {"ok": None}


def test_a_request_without_a_waiting_client_does_nothing() -> None:
    assert answer_of("start", before=time.time() - 1)["error"] == "TooLate"


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("fly", {}, "BadInput", "fly: no such function; the functions are status, start"),
        ("status", {"much": 1}, "TypeError", "unexpected keyword argument 'much'"),
    ],
)
def test_an_impossible_request_returns_an_error(name: str, arguments: Any, error: str, message: str) -> None:
    answer = answer_of(name, **arguments)
    assert answer["error"] == error and message in answer["message"]


class Odd:
    def __repr__(self) -> str:
        return "x" * 20_000 + "\udcff"


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (None, {"type": "NoneType", "json": None}),
        ([1, 2.5, "a", {"b": None}], {"type": "list", "json": [1, 2.5, "a", {"b": None}]}),
        ({1: 2}, {"type": "dict", "text": "{1: 2}", "truncated": False}),  # JSON would turn the key into a string
        ((1, 2), {"type": "tuple", "text": "(1, 2)", "truncated": False}),
        (float("nan"), {"type": "float", "text": "nan", "truncated": False}),
        (np.float64(0.5), {"type": "numpy.float64", "shape": [], "dtype": "float64", "json": 0.5}),
        (torch.tensor([[1, 2]]), {"type": "torch.Tensor", "shape": [1, 2], "dtype": "torch.int64", "json": [[1, 2]]}),
        ({1}, {"type": "set", "text": "{1}", "truncated": False}),
    ],
    ids=str,
)
def test_a_value_is_json_if_possible_and_otherwise_text(value: Any, data: dict[str, Any]) -> None:
    assert value_data(value) == data


def test_a_large_value_becomes_shortened_text() -> None:
    large = value_data(torch.zeros(2000))
    assert large["text"].startswith("tensor([0., 0.") and large["shape"] == [2000]
    assert value_data([0.1] * 10_000)["truncated"] is True
    odd = value_data(Odd())
    assert len(odd["text"]) == 10_000 and odd["truncated"] is True


def test_every_function_is_a_tool_and_every_tool_a_function() -> None:
    tools = pytest.importorskip("ddip.server.tools")
    names = {spec.rpartition(":")[2].removeprefix("ddip_") for spec in tools.TOOLS}
    assert names == {*for_programs.FUNCTIONS, "notebooks"}
    assert all(getattr(tools, f"ddip_{name}").__doc__ for name in names)


# -- in the Jupyter server


@pytest.mark.parametrize("header", ["token secret", "Token secret", "Bearer secret", "bearer  secret "])
def test_the_token_of_the_server_gives_access(header: str) -> None:
    assert tokens.why_not("secret", header, "") == ""


@pytest.mark.parametrize(
    ("token", "header", "typed", "why"),
    [
        ("secret", "", "", "needs the token"),
        ("secret", "Basic secret", "", "needs the token"),
        ("secret", "token Secret", "", "is not the token"),
        ("secret", "token secret2", "", "is not the token"),
        ("secret", "token ünïcode", "", "is not the token"),
        ("secret", "token secret", "another", "is not the token"),
        ("", "", "", "has no token"),
        ("", "token ", "", "has no token"),
    ],
)
def test_a_missing_or_wrong_token_is_refused(token: str, header: str, typed: str, why: str) -> None:
    assert why in tokens.why_not(token, header, typed)


def test_a_token_in_the_url_gives_access() -> None:
    assert tokens.why_not("secret", "", "secret") == ""


def server_session(path: str) -> dict[str, Any]:
    return {"path": path, "kernel": {"id": f"id of {path}", "execution_state": "idle"}}


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("a.ipynb", "a.ipynb"),
        ("/a.ipynb", "a.ipynb"),
        ("b.ipynb", "work/b.ipynb"),
        ("id of work/b.ipynb", "work/b.ipynb"),
    ],
)
def test_a_notebook_is_found_by_path_name_or_kernel(typed: str, found: str) -> None:
    assert (
        kernels.choose_notebook([server_session("a.ipynb"), server_session("work/b.ipynb")], typed)["notebook"] == found
    )


@pytest.mark.parametrize(
    ("paths", "typed", "why"),
    [
        ([], "", "no notebook"),
        (["a", "b"], "", "`notebook`: a, b$"),
        (["a", "b"], "c", "^c: .*: a, b$"),
        (["x/a", "y/a"], "a", "^a: .*: x/a, y/a$"),
    ],
)
def test_an_ambiguous_choice_of_a_notebook_lists_the_candidates(paths: list[str], typed: str, why: str) -> None:
    with pytest.raises(KernelError, match=why):
        kernels.choose_notebook([server_session(path) for path in paths], typed)


def test_a_single_notebook_is_chosen_without_its_name() -> None:
    assert kernels.choose_notebook([server_session("a")], "") == {
        "notebook": "a",
        "kernel": "id of a",
        "state": "idle",
    }


def kernel_reply(**answer: Any) -> dict[str, Any]:
    data = {ANSWER_MIME: json.dumps(answer)}
    return {"status": "ok", "user_expressions": {kernels.KEY: {"status": "ok", "data": data}}}


def test_the_reply_of_the_kernel_is_the_answer() -> None:
    assert answer_in(kernel_reply(ok={"number": 7})) == {"number": 7}
    with pytest.raises(KernelError, match="^BadInput: type this$"):
        answer_in(kernel_reply(error="BadInput", message="type this"))
    with pytest.raises(KernelError, match="busy"):
        answer_in(kernel_reply(error="TooLate", message=""))


@pytest.mark.parametrize(
    ("expressions", "why"),
    [
        (
            {kernels.KEY: {"status": "error", "ename": "ModuleNotFoundError", "evalue": "no ddip"}},
            "ModuleNotFoundError",
        ),
        ({}, "IPython"),
    ],
)
def test_a_kernel_that_has_no_ddip_says_so(expressions: Any, why: str) -> None:
    with pytest.raises(KernelError, match=why):
        answer_in({"status": "ok", "user_expressions": expressions})
