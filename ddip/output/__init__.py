"""Output below a cell: progress, transcripts, terminal text and widgets."""
