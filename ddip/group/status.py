"""What is known of the ranks, asked beside the cells that run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddip.group import stopping
from ddip.group.placement import GroupSpec
from ddip.group.ranks import Ranks
from ddip.output.tables import RankInfo
from ddip.protocol import on_rank

ANSWER_SECONDS = 2.0
"""How long a rank may take to tell its figures."""


def rank_infos(ranks: Ranks, spec: GroupSpec, button: stopping.Button) -> list[RankInfo]:
    """Each rank of the group of `spec`: where it lives, its memory, and what it is doing."""
    ended, abandoned, everywhere = ranks.ended, ranks.busy, range(len(ranks.members))
    answers = ranks.call_on_control_channel(everywhere, on_rank.figures(), seconds=ANSWER_SECONDS, button=button)
    infos = []
    for rank, member in enumerate(ranks.members):
        figures: Mapping[str, Any] = answers[rank] or {}
        state, doing = "ended" if rank in ended else "no answer", figures.get("doing") or abandoned.get(rank, "")
        if figures:
            state = "busy" if figures["busy"] else "GPU lost" if rank in ranks.gpu_lost else "idle"
        elif rank not in ended and ranks.stopped_text(rank):
            state, doing = "stopped", ranks.stopped_text(rank)
        gpu = figures.get("gpu") or {}
        infos.append(
            RankInfo(
                rank=rank,
                host=member.host,
                pid=member.pid,
                device=spec.device_name(rank),
                memory=figures.get("memory"),
                gpu_allocated=gpu.get("allocated"),
                gpu_reserved=gpu.get("reserved"),
                gpu_total=gpu.get("total"),
                state=state,
                seconds=figures.get("seconds"),
                doing=doing,
                busy_for=figures.get("busy_for"),
            )
        )
    return infos
