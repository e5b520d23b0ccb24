"""The state of this rank's variables: recorded after good cells, compared between ranks, copied to other ranks."""

from ddip.rank.inspection.advice import find_advice
from ddip.rank.inspection.stale import rank_marks, refuse_stale
from ddip.rank.inspection.state_history import is_recorded
from ddip.rank.inspection.state_report import describe_paths, hash_variables, list_snapshots
from ddip.rank.inspection.state_sync import sync_state

__all__ = [
    "find_advice",
    "hash_variables",
    "describe_paths",
    "is_recorded",
    "rank_marks",
    "refuse_stale",
    "list_snapshots",
    "sync_state",
]
