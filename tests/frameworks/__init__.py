"""Frameworks in cells: the same script under ddip and under torchrun, and again after faults; scripts/ has them."""
