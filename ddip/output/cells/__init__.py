"""The output of one cell: routed from ranks to a view, recorded, and shown again."""
