"""Data and declarations that cross processes; both sides import them.

``on_rank.py`` declares each function of a rank that the notebook calls: a new one gets a row there, and any change a
higher ``VERSION``. ``reports.py`` has the answers of ranks, ``schemas/`` the JSON for programs, and ``compat_*.py`` the
private names of each library, as needed by every group or by one feature.
"""
