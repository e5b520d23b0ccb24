"""Mechanisms below the public interfaces of Python, torch and Linux: one file each.

Each file says what it does, why nothing gentler works, what can go wrong, and which variable turns it off.
``protocol/switches.py`` has the variables; `self_tests` tries at the start of a rank what can be tried.
"""
