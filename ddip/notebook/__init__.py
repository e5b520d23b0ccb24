"""Magics, their arguments and settings, and the help and hints for a person who types.

``for_programs.py`` offers the same to programs: a new magic or option may need a function there.
"""
