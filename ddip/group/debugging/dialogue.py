"""Ask the user for the answers to ranks' questions, at one prompt on the main thread of the notebook's kernel.

The prompt is ``input()`` of the notebook, so it works in each front end that has stdin. While it is open, a second
thread follows the cell, so that output of other ranks appears above it:

    main thread        Dialogue.ask_next: input() ----------------------> line -> answer, or a command of this module
    thread, meanwhile  RunningCell.follow_once; if the asking rank ends: SIGINT to the main thread, which ends input()

Several ranks may wait for answers. One of them is current: its prompt is shown, and what is typed goes to it.
"""

from __future__ import annotations

import contextvars
import getpass
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from IPython.core.getipython import get_ipython

from ddip.errors import ranks_text
from ddip.group.debugging.open_questions import OpenQuestion, OpenQuestions
from ddip.group.stopping import call_on_press

TOGETHER_SECONDS = 0.3
"""Time for an answered rank to ask again, and for others to stop at the same place, before the user is asked."""
HELP = "commands go to the rank of the prompt; others: rank N, all COMMAND, ranks, c all; q ends the cell"
HELP_AFTER_ERROR = "u and d move between its frames, q closes the debugger"
CONTINUE = ("c", "cont", "continue")
QUIT = ("q", "quit", "exit", "q()", "quit()", "exit()", "EOF")


class AskingCell(Protocol):
    """A running cell, as this module needs it."""

    questions: OpenQuestions

    @property
    def unfinished(self) -> Sequence[int]:
        """The ranks that still run the cell."""

    @property
    def world_size(self) -> int:
        """The number of ranks of the group."""

    def answer(self, question: OpenQuestion, text: str | None) -> None:
        """Send the answer to a question; None raises EOFError on the rank."""

    def press_stop(self) -> None:
        """Interrupt the cell, without waiting."""

    def wake_up(self) -> None:
        """Wake the thread that follows the cell, which then checks whether the prompt has ended."""

    def describe_places(self) -> str:
        """Return the position of each rank, one line per position."""


def can_prompt() -> bool:
    """Return whether this thread can ask the user.

    It must be the main thread of a kernel whose front end has stdin, or of a process in a terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is not None:
        return bool(kernel.get_parent("shell").get("content", {}).get("allow_stdin", False))
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


class Dialogue:
    """The dialogue of the user with the ranks of one cell."""

    def __init__(self, cell: AskingCell) -> None:
        self._cell = cell
        self._current: int | None = None
        """The rank to which typed lines go."""
        self._answered: set[int] = set()
        """The ranks that were answered last, and may ask again at once."""
        self._stepping: set[int] = set()
        """Those of them whose debugger has received another command than to continue."""
        self._since = 0.0
        """Start of the wait for further questions, on ``time.monotonic``; 0.0: none has begun."""
        self._is_introduced = False
        self._is_headed = False
        """True if the next text of a rank has its number above it in any case, as after ``all``."""
        self._shown: set[tuple[int, int]] = set()
        """Rank and number of each question whose text has been printed."""

    @property
    def is_due(self) -> bool:
        """True if a question is open, and those that would arrive together with it have had time to do so."""
        waiting = self._cell.questions.by_rank
        if not waiting:
            self._since = 0.0
            return False
        self._since = self._since or time.monotonic()
        expected = self._answered if self._is_introduced else set(self._cell.unfinished)
        missing = expected.intersection(self._cell.unfinished).difference(waiting)
        return not missing or time.monotonic() > self._since + TOGETHER_SECONDS

    def ask_next(self, follow: Callable[[], object] | None) -> None:
        """Show the current rank's question, read a line and act on it; runs on the main thread.

        `follow` processes the next event of the cell, and is called on another thread meanwhile; None: the cell has a
        thread of its own. Raises what `follow` raises.
        """
        waiting = self._cell.questions.by_rank
        self._since = 0.0
        if not waiting:  # the thread of a background cell may have withdrawn them
            return
        self._select_current(waiting)
        self._print_texts(waiting)
        assert self._current is not None
        question = waiting[self._current]
        reader = _Reader(self._cell, question, follow)
        line = reader.read(self._prompt_of(question))
        if reader.is_withdrawn:
            if question.rank not in self._cell.unfinished:
                print(f"ddip: rank {question.rank} no longer runs the cell")
        elif reader.is_interrupted or (line is None and self._ends_cell(question)):
            self._stop_cell()
        elif question.asked["is_command"]:
            self._act_on(QUIT[0] if line is None else line, waiting)
        else:
            self._answer([question], line)

    def converse(self, is_over: Callable[[], bool], rank: int | None) -> None:
        """Ask until no rank of a background cell waits for an answer, or `is_over` returns True.

        Begins with `rank`; None: any.
        """
        self._current = self._current if rank is None else rank
        with call_on_press(self._cell.press_stop):
            while not is_over():
                if self.is_due:
                    self.ask_next(None)
                elif self._cell.questions or self._is_stepping():
                    self._cell.questions.wait_for_change(TOGETHER_SECONDS / 3)
                else:
                    break

    def _is_stepping(self) -> bool:
        """Return whether a rank will ask again soon.

        It does if its debugger has received a command other than to continue.
        """
        return not self._stepping.isdisjoint(self._cell.unfinished)

    def _select_current(self, waiting: dict[int, OpenQuestion]) -> None:
        if self._current in waiting:
            return
        former, self._current = self._current, min(waiting)
        if former is not None and former in self._cell.unfinished:
            print(f"ddip: rank {former} continues; the prompt is rank {self._current}'s")

    def _print_texts(self, waiting: dict[int, OpenQuestion]) -> None:
        """Print what the debuggers have written: equal texts once, with the ranks if there are several."""
        ranks_of: dict[str, list[int]] = {}
        for rank, question in waiting.items():
            key = rank, question.asked["number"]
            if question.asked["text"] and key not in self._shown:
                self._shown.add(key)
                ranks_of.setdefault(question.asked["text"], []).append(rank)
        for text, ranks in ranks_of.items():
            is_clear = ranks == [self._current] and len(waiting) == 1 and not self._is_headed
            head = "" if is_clear or self._cell.world_size == 1 else f"[{ranks_text(ranks)}]\n"
            print(head + text, end="" if text.endswith("\n") else "\n")
        self._is_headed = False
        if not self._is_introduced:
            self._is_introduced = True
            timeouts = [limit for question in waiting.values() if (limit := question.asked["timeout"]) is not None]
            if timeouts and self._cell.world_size > 1:
                print(f"ddip: other ranks wait {min(timeouts):g} s at most in collectives: a group has this timeout=")
            stopped = [rank for rank, question in waiting.items() if question.asked["is_command"]]
            if stopped and self._cell.world_size > 1:
                has_failed = all(waiting[rank].asked["is_post_mortem"] for rank in stopped)
                have = "has" if len(stopped) == 1 else "have"
                what = f"failed; {HELP_AFTER_ERROR}" if has_failed else f"stopped; {HELP}"
                print(f"ddip: {ranks_text(stopped)} {have} {what}")

    def _prompt_of(self, question: OpenQuestion) -> str:
        count, asked = self._cell.world_size, question.asked
        if asked["is_command"]:
            where = f", {asked['place']}" if asked["place"] else ""
            return f"rank {question.rank} of {count}{where} {asked['prompt']}"
        return asked["prompt"] if count == 1 else f"rank {question.rank}: {asked['prompt']}"

    def _act_on(self, line: str, waiting: dict[int, OpenQuestion]) -> None:
        """Carry out a line typed at a debugger's prompt."""
        assert self._current is not None
        question = waiting[self._current]
        words = line.split()
        if len(words) == 2 and words[0] in (*CONTINUE, *QUIT) and words[1] == "all":  # as in c all
            words.reverse()
            line = " ".join(words)
        stopped = {rank: question for rank, question in waiting.items() if question.asked["is_command"]}
        match words:
            case ["rank", number] if number.isdecimal():
                self._change_rank(int(number), waiting)
            case ["ranks"] | ["all", "ranks"]:
                print(self._cell.describe_places())
            case ["all"]:
                print("ddip: all needs a command, as in all p loss")
            case [word] | ["all", word] if word in QUIT and self._ends_cell(question):
                self._stop_cell()
            case ["all", *_]:
                self._is_headed = True
                self._answer(stopped.values(), line.strip().removeprefix("all").strip())
            case _:
                self._answer([question], line)

    def _change_rank(self, rank: int, waiting: dict[int, OpenQuestion]) -> None:
        if rank in waiting:
            self._current = rank
        else:
            problem = f"rank {rank} has not stopped" if rank < self._cell.world_size else f"there is no rank {rank}"
            print(f"ddip: {problem}; at a prompt: {ranks_text([*waiting])}")

    def _stop_cell(self) -> None:
        """Stop the cell and withdraw its questions.

        None of them must be asked before the stop takes effect.
        """
        self._cell.press_stop()
        self._cell.questions.drop()

    @staticmethod
    def _ends_cell(question: OpenQuestion) -> bool:
        """Return whether the end of the dialogue at `question` ends the cell.

        A failed rank ends it anyway, and ``q`` in a debugger that ``debug`` has opened returns to the outer one.
        """
        is_inner = question.asked["prompt"].startswith("((")
        return question.asked["is_command"] and not question.asked["is_post_mortem"] and not is_inner

    def _answer(self, questions: Collection[OpenQuestion], text: str | None) -> None:
        questions = list(questions)
        self._answered = {question.rank for question in questions}
        goes_on = (text or "").strip() in CONTINUE
        self._stepping = {each.rank for each in questions if each.asked["is_command"] and not goes_on}
        for question in questions:
            self._cell.answer(question, text)


class _Reader:
    """Reads one line from the user for `question`, while the cell goes on."""

    def __init__(self, cell: AskingCell, question: OpenQuestion, follow: Callable[[], object] | None) -> None:
        self._cell, self._question, self._follow = cell, question, follow
        self._may_raise = False
        """True while SIGINT raises KeyboardInterrupt, which ends the prompt."""
        self._is_done = threading.Event()
        self._error: BaseException | None = None
        self.is_withdrawn = False
        """True if the question was withdrawn, as its rank no longer waits for an answer."""
        self.is_interrupted = False
        """True if the user has pressed the stop button."""

    def read(self, prompt: str) -> str | None:
        """Return the typed line; None at the end of input, after a stop and if the question was withdrawn.

        Raises an error of `follow`.
        """
        former = signal.signal(signal.SIGINT, self._handle_interrupt)
        context = contextvars.copy_context()
        watcher = threading.Thread(target=context.run, args=(self._watch,), name="ddip-prompt", daemon=True)
        line: str | None = None
        try:
            watcher.start()
            line = self._read_line(prompt)
        except KeyboardInterrupt:  # which is raised at most once, and here because it may end `_read_line` anywhere
            if getattr(get_ipython(), "kernel", None) is None:
                print()  # the cursor is still after the prompt
        finally:
            self._is_done.set()
            self._cell.wake_up()
            watcher.join()
            signal.signal(signal.SIGINT, former)
        if self._error is not None:
            raise self._error
        return line

    def _read_line(self, prompt: str) -> str | None:
        self._may_raise = True
        try:
            if self.is_withdrawn or self.is_interrupted:  # before the prompt could be interrupted
                return None
            return (getpass.getpass if self._question.asked["is_password"] else input)(prompt)
        except EOFError:
            print()  # the cursor is still after the prompt
            return None
        finally:
            self._may_raise = False

    def _handle_interrupt(self, number: int, frame: object) -> None:
        if not self.is_withdrawn:
            self.is_interrupted = True
        if self._may_raise:
            self._may_raise = False
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Follow the cell until the line has been read; withdraw the question if its rank no longer waits."""
        while not self._is_done.is_set():
            try:
                if self._follow is not None and self._error is None:
                    self._follow()
                else:
                    self._cell.questions.wait_for_change(0.1)
            except BaseException as error:  # the group or the controller has ended; the main thread raises it
                self._error = error
            is_open = self._question in self._cell.questions and self._error is None
            if not is_open and not self._is_done.is_set():
                self.is_withdrawn = True
                if self._may_raise:  # also again: a signal that comes just before the call to read does not end it
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
