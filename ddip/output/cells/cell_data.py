"""A cell as plain data: the output and outcome on each rank. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ddip.errors import RANK_ENDED, STOPPED, RankError
from ddip.output.terminal_text import strip_escapes
from ddip.output.transcript import RankTranscript, add_label, plain_of
from ddip.output.widgets import Message
from ddip.protocol.status_types import SCHEMA, TEXT_CHARACTERS, CellData, CellOutcome, ErrorData, PartData, PartState
from ddip.protocol.text import escape_surrogates

MESSAGE_CHARACTERS = 5_000


@dataclass(frozen=True)
class Part:
    """State, error and output of a cell on one rank."""

    state: PartState
    seconds: float | None = None
    error: RankError | None = None
    text: str | None = None
    """Text of the output; None if the rank's output is not shown."""
    truncated: bool = False


def cell_data(number: int, outcome: CellOutcome | None, seconds: float, parts: Mapping[int, Part]) -> CellData:
    """Return a cell as plain data, with the `parts` by rank.

    A text that several ranks have shown is there once, for the first; the others have its rank in ``same_text_as``.
    """
    first: dict[str, int] = {}
    ranks = {}
    for rank, part in sorted(parts.items()):
        data: PartData = {
            "state": part.state,
            "seconds": None if part.seconds is None else round(part.seconds, 3),
            "error": None if part.error is None else error_data(part.error),
        }
        if part.text is not None and first.setdefault(part.text, rank) != rank and part.text:
            data["same_text_as"] = first[part.text]
        elif part.text is not None:
            data["text"], data["truncated"] = part.text, part.truncated
        ranks[str(rank)] = data
    return {"schema": SCHEMA, "number": number, "outcome": outcome, "seconds": round(seconds, 3), "ranks": ranks}


def state_of(error: RankError | None, replied: bool, outcome: CellOutcome | None, begun: bool = True) -> PartState:
    """Return the state of a cell on one rank, in the words of the data format.

    `error`: the rank's error, None without one; `replied`: the cell has ended there; `outcome`: that of the cell, None
    while it runs; `begun`: it was sent to its ranks.
    """
    if error is not None and error.name == RANK_ENDED:
        return "ended"
    if not begun:
        return "queued" if outcome is None else "not_run"
    if not replied:
        return "running"
    if error is None:
        return "ok"
    if error.waited:
        return "released"
    return "interrupted" if error.name in STOPPED else "failed"


def error_data(error: RankError) -> ErrorData:
    """Return an error as data without colours, its texts cut to their last characters."""
    return {
        "name": error.name,
        "message": _last_characters(escape_surrogates(strip_escapes(error.message)), MESSAGE_CHARACTERS),
        "traceback": _last_characters(escape_surrogates(strip_escapes(error.traceback)), TEXT_CHARACTERS),
        "waited": error.waited,
    }


def rank_texts(
    messages: Iterable[tuple[int, Message]], ranks: Iterable[int], limit: int, most: int = TEXT_CHARACTERS
) -> dict[int, tuple[str, bool]]:
    """Return each rank's output as plain text, and True if only its last `most` characters are left.

    `limit` is the length of one stream's text above which its middle is omitted, with a line that says how much.
    """
    transcripts = {rank: RankTranscript(limit) for rank in ranks}
    for rank, message in messages:
        if rank in transcripts:
            _add_message(transcripts[rank], message)
    whole = {rank: escape_surrogates(plain_of(transcript.items)) for rank, transcript in transcripts.items()}
    return {rank: (_last_characters(text, most), len(text) > most) for rank, text in whole.items()}


def _add_message(transcript: RankTranscript, message: Message) -> None:
    content = message["content"]
    match message["header"]["msg_type"]:
        case "stream":
            transcript.text(content["name"], content["text"], content.get("line"), content.get("cut", 0))
        case "display_data":
            transcript.display(content["data"], None, (content.get("transient") or {}).get("display_id"))
        case "execute_result":
            transcript.display(add_label(f"Out[{content['execution_count']}]:", content["data"]))
        case "update_display_data":
            transcript.update(content["data"], None, content["transient"]["display_id"])


def _last_characters(text: str, most: int) -> str:
    return text if len(text) <= most else text[-most:]
