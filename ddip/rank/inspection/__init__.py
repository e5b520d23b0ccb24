"""The state of this rank's variables: recorded after good cells, compared between ranks, copied to other ranks."""

from ddip.rank.inspection.advice import advise
from ddip.rank.inspection.stale import rank_marks, refuse_stale
from ddip.rank.inspection.state_history import is_recorded
from ddip.rank.inspection.state_report import compare, describe, snapshots
from ddip.rank.inspection.state_sync import sync

__all__ = ["advise", "compare", "describe", "is_recorded", "rank_marks", "refuse_stale", "snapshots", "sync"]
