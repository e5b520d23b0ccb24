"""All ranks of a notebook as one object: started, used, repaired and ended.

A method of `Group` (``group.py``) calls one of the packages below, which decide and do the work.
"""
