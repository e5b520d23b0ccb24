"""Ask the user a question from a rank and wait for the answer: ``input()``, ``getpass`` and debuggers.

    rank, the thread that asks                            notebook's kernel
    -------------------------------------------           ------------------------------------------------------
    ask_user  ---- "ddip_question", IOPub ------------->  RunningCell: an event in the cell's queue
        |                                                 Dialogue: input() of the notebook, on its main thread
        | waits in SimpleQueue.get                            |
    give_answer, control thread <---- "ddip_request" ---------+

The question travels with the cell's output, so it needs no socket of its own and arrives after everything that the cell
has printed before. SIGINT ends the wait, as it ends other code of a cell; a thread that asks gets EOFError then.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from IPython.core.error import StdinNotImplementedError

from ddip.protocol.cell_messages import AskedQuestion
from ddip.rank.runtime import c10d, stacks

NO_STDIN = (
    "stdin is not available on ranks here; ask with input() in the notebook, %%dip local or a plain cell, and %dipush "
    "the answer"
)
IN_WORKER = (
    "{what} in {worker} (process {pid}), a process that the rank has started: it cannot ask the user; {instead}, where "
    "it can"
)
FOREIGN_PROMPTS = ("(Pdb", "ipdb>", "(ipdb")
"""Prompts of debuggers other than ddip's."""


class Debugger(Protocol):
    """A debugger at its prompt."""

    prompt: str
    is_post_mortem: bool

    def take_text(self) -> str:
        """Return the text that the debugger has written since the last call."""

    def describe_place(self) -> str:
        """Return the function and line at which the debugger has stopped."""


class Asker:
    """The open questions of the running cell, and who can answer them."""

    def __init__(self) -> None:
        self.can_ask = False
        """True if someone can answer the questions of the running cell."""
        self.break_on: Sequence[int] | None = None
        """The ranks on which ``breakpoint()`` stops; None: all."""
        self.is_used = False
        """True if the cell has asked a question or created a debugger."""
        self._pid = 0
        self._is_ended = False
        """True if the cell was interrupted: some debuggers ask again, and no one would answer."""
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[str | None]] = {}
        """A queue for the answer to each open question, by its number."""
        self._debuggers: dict[int, Debugger] = {}
        """The debuggers at their prompts, by thread."""

    def begin_cell(self, can_ask: bool, break_on: Sequence[int] | None) -> None:
        """Begin a cell, whose questions can be answered if `can_ask`.

        `break_on`: the ranks on which ``breakpoint()`` stops; None: all.
        """
        self.can_ask, self.break_on = can_ask, break_on
        self._pid, self._is_ended, self.is_used = os.getpid(), False, False

    def end_cell(self) -> None:
        """End the cell: threads that still ask get EOFError."""
        self.can_ask = False
        self.end_questions()

    def end_questions(self) -> None:
        """Answer all open questions of this cell, and all later ones, with EOFError; runs on any thread."""
        self._is_ended = True
        for answers in list(self._answers.values()):
            answers.put(None)

    def enter(self, debugger: Debugger) -> Debugger | None:
        """Make `debugger` the one that asks on this thread, and return the former one."""
        former = self._debuggers.get(threading.get_ident())
        self._debuggers[threading.get_ident()] = debugger
        return former

    def leave(self, former: Debugger | None) -> None:
        """Make `former`, the result of `enter`, the debugger of this thread again."""
        if former is None:
            self._debuggers.pop(threading.get_ident(), None)
        else:
            self._debuggers[threading.get_ident()] = former

    def refuse_in_worker(self, what: str) -> None:
        """Raise StdinNotImplementedError in a process that a cell has forked; `what`: the call to name."""
        if os.getpid() == self._pid:
            return
        worker, instead = "a process of multiprocessing", "call it in the rank itself"
        info = _worker_info()
        if info is not None:
            worker, instead = f"data-loader worker {info.id}", "num_workers=0 runs the data set in the rank"
        raise StdinNotImplementedError(IN_WORKER.format(what=what, worker=worker, pid=os.getpid(), instead=instead))

    def ask_user(self, send: Callable[[AskedQuestion], object], prompt: str, is_password: bool) -> str:
        """Ask the user by means of `send`, and return the typed line.

        Raises EOFError if the user ends the input or the cell has been interrupted, KeyboardInterrupt if it is
        interrupted meanwhile, and StdinNotImplementedError if no one can answer.
        """
        self.refuse_in_worker("getpass()" if is_password else "input()")
        if not self.can_ask:
            raise StdinNotImplementedError(NO_STDIN)
        if self._is_ended:
            raise EOFError
        self.is_used = True
        debugger = self._debuggers.get(threading.get_ident())
        number = next(self._numbers)
        answers = self._answers[number] = queue.SimpleQueue()
        is_command = prompt.startswith(FOREIGN_PROMPTS) if debugger is None else prompt == debugger.prompt
        timeout = c10d.shortest_timeout()
        question: AskedQuestion = {
            "number": number,
            "prompt": prompt,
            "is_password": is_password,
            "is_command": is_command,
            "is_post_mortem": debugger is not None and debugger.is_post_mortem,
            "timeout": None if timeout is None else timeout.total_seconds(),
            "place": "" if debugger is None else debugger.describe_place(),
            "text": "" if debugger is None else debugger.take_text(),
        }
        stacks.at_prompt += 1
        try:
            send(question)
            answer = answers.get()
        except KeyboardInterrupt:
            self._is_ended = True
            raise
        finally:
            stacks.at_prompt -= 1
            del self._answers[number]
        if answer is None:
            raise EOFError
        return answer

    def give_answer(self, number: int, text: str | None) -> None:
        """Answer the question with this `number`, if it is still open; None raises EOFError there."""
        answers = self._answers.get(number)
        if answers is not None:
            answers.put(text)


def _worker_info() -> Any:
    """Return torch's description of the data-loader worker that this process is; None if it is none."""
    from torch.utils.data import get_worker_info

    return get_worker_info()


asker = Asker()
give_answer = asker.give_answer
