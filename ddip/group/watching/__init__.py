"""What ranks do and hold while their cells run."""
