"""Stops of pushes and pulls on a link of 10 Mbit/s: they end at once, and the next cell runs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

import ddip
from ddip.errors import RequestInterrupted

from .network import Network

SIZE = 30_000_000
"""Bytes, for which the link needs 24 s."""
STOP_SECONDS = 4
"""Most time from the press to the error; a part of 16 MiB, as before, needs 13 s."""
Action = Callable[[ddip.Group], object]


@pytest.fixture
def hosts(network: Network) -> Network:
    """Return the hosts; the tests share a group, so leftovers are checked once at the end."""
    return network


@pytest.fixture(scope="module")
def group(network: Network) -> Iterator[ddip.Group]:
    """Start a rank on h1 and one on h2."""
    with ddip.Group(1, hosts="h1,h2") as group:
        group.run(f"import os; a = rank; big = os.urandom({SIZE})")
        yield group


@contextlib.contextmanager
def slow_links(hosts: Network, rate: str) -> Iterator[None]:
    with hosts["h1"].slowed_to(rate), hosts["h2"].slowed_to(rate):
        yield


def press_when_seen(words: str, pressed: list[float], at: int = 3) -> Callable[..., None]:
    """Return a progress report that presses stop once, 0.2 s after the step number `at` that has `words`."""
    steps: list[str] = []

    def report(text: str, share: float | None = None) -> None:
        steps.append(text)
        if not pressed and sum(words in step for step in steps) == at:
            signal.setitimer(signal.ITIMER_REAL, 0.2)

    def press(*_: object) -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGALRM, press)
    return report


@pytest.mark.parametrize("what", ["push", "pull"])
def test_a_stop_on_a_slow_link_changes_nothing(
    group: ddip.Group, hosts: Network, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pressed: list[float] = []
    progress = press_when_seen(f"{what}ing ", pressed)
    with slow_links(hosts, "10mbit"):
        with pytest.raises(RequestInterrupted, match=f"nothing was {what}ed") as caught:
            if what == "push":
                group.push({"a": os.urandom(SIZE)}, progress=progress)
            else:
                group.pull(["big"], 1, progress=progress)
        assert time.monotonic() - pressed[0] < STOP_SECONDS
        assert "did not stop" not in str(caught.value)
        group.run(f"assert a == rank and len(big) == {SIZE}")
    assert "slow link" not in capsys.readouterr().err


def test_a_stop_waits_for_data_still_on_the_link(
    group: ddip.Group, hosts: Network, capsys: pytest.CaptureFixture[str]
) -> None:
    """The link becomes slow in the middle of a large part."""
    with contextlib.ExitStack() as slow:
        press_soon = press_when_seen("pushing ", [], at=1)

        def slow_down(text: str, share: float | None = None) -> None:
            if share and share > 0.1 and not slowed:
                slowed.append(slow.enter_context(slow_links(hosts, "4mbit")))
                press_soon(text)

        slowed: list[None] = []
        with pytest.raises(RequestInterrupted, match="nothing was pushed"):
            group.push({"a": os.urandom(SIZE)}, progress=slow_down)
        assert "until the slow link to h1, h2 has carried the rest (up to" in capsys.readouterr().err
        group.run("assert a == rank")
