"""The ranks of a group: placement, engines, liveness and requests."""
