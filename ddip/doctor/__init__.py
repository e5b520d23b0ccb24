"""``python -m ddip doctor``: find what keeps ddip from working on this machine, and suggest remedies.

Each check reads figures in a ``check_`` function, and its ``judge_`` function says what they mean.
"""
