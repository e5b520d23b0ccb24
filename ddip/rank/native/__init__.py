"""Mechanisms below the public interfaces of Python, torch and Linux, one per file.

Each file says what the mechanism does, why nothing gentler works, what can go wrong, and which environment variable
turns it off. ``protocol/switches.py`` lists the variables. `self_tests` tests the mechanisms when a rank starts.
"""
