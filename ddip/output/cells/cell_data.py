"""A cell as plain data: what each rank has shown, and how it has ended there. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ddip.errors import RANK_ENDED, STOPPED, RankError
from ddip.output.terminal_text import plain
from ddip.output.transcript import RankTranscript, labelled, plain_of
from ddip.output.widgets import Message
from ddip.protocol.status_types import SCHEMA, TEXT_CHARACTERS, CellData, CellOutcome, ErrorData, PartData, PartState
from ddip.protocol.text import readable

MESSAGE_CHARACTERS = 5_000


@dataclass(frozen=True)
class Part:
    """What is known of a cell on one rank."""

    state: PartState
    seconds: float | None = None
    error: RankError | None = None
    text: str | None = None
    """None: it is not shown."""
    truncated: bool = False


def cell_data(number: int, outcome: CellOutcome | None, seconds: float, parts: Mapping[int, Part]) -> CellData:
    """The data of one cell; text that several ranks have shown is there once."""
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
    """What has become of a cell on a rank that raised `error`, if any, and has `replied` or not."""
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
    """An error without colours, and of bounded length."""
    return {
        "name": error.name,
        "message": _end(readable(plain(error.message)), MESSAGE_CHARACTERS),
        "traceback": _end(readable(plain(error.traceback)), TEXT_CHARACTERS),
        "waited": error.waited,
    }


def texts(
    messages: Iterable[tuple[int, Message]], ranks: Iterable[int], limit: int, most: int = TEXT_CHARACTERS
) -> dict[int, tuple[str, bool]]:
    """What each of `ranks` shows by its `messages`, as text without colours; and whether more than its `most` last
    characters are missing. `limit` is that of the views."""
    transcripts = {rank: RankTranscript(limit) for rank in ranks}
    for rank, message in messages:
        if rank in transcripts:
            _add(transcripts[rank], message)
    whole = {rank: readable(plain_of(transcript.items)) for rank, transcript in transcripts.items()}
    return {rank: (_end(text, most), len(text) > most) for rank, text in whole.items()}


def _add(transcript: RankTranscript, message: Message) -> None:
    content = message["content"]
    match message["header"]["msg_type"]:
        case "stream":
            transcript.text(content["name"], content["text"], content.get("line"), content.get("cut", 0))
        case "display_data":
            transcript.display(content["data"], None, (content.get("transient") or {}).get("display_id"))
        case "execute_result":
            transcript.display(labelled(f"Out[{content['execution_count']}]:", content["data"]))
        case "update_display_data":
            transcript.update(content["data"], None, content["transient"]["display_id"])


def _end(text: str, most: int) -> str:
    return text if len(text) <= most else text[-most:]
