"""Objects and modules between the notebook and its ranks."""
