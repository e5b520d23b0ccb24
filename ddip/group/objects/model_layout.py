"""Collect the layout of a sharded model across the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ddip.errors import BadInput, ranks_text
from ddip.group.members.ranks import Ranks
from ddip.output.tables.shards_table import ShardsTable
from ddip.protocol import on_rank
from ddip.protocol.reports import ShardsReport


def fetch_layout(ranks: Ranks, name: str) -> ShardsTable:
    """Ask all ranks which parts of the model `name` they hold, and return them as a table.

    `name` may be a part, such as ``model.encoder``. Raises BadInput if a rank has no such variable or it is not a
    module, GroupError if a rank is busy or has ended, and RequestInterrupted after a stop.
    """
    reports: Sequence[ShardsReport] = ranks.ask(range(len(ranks.members)), on_rank.describe_shards(name))
    lack = [rank for rank, report in enumerate(reports) if not report["is_there"]]
    if lack:
        kind = "part" if "." in name else "variable"
        raise BadInput(
            f"%dipshards {name}: {ranks_text(lack)} {'has' if len(lack) == 1 else 'have'} no {kind} {name}; create "
            "the model in a %%dip cell first"
        )
    others = [rank for rank, report in enumerate(reports) if report["tensors"] is None]
    if others:
        raise BadInput(
            f"%dipshards {name}: it is of type {reports[others[0]]['kind']} on {ranks_text(others)}, not a module; "
            "type the name of a model, a torch.nn.Module"
        )
    return ShardsTable(name, reports)
