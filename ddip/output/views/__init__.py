"""Views of a cell's output: one rank, labels, groups, tabs."""
