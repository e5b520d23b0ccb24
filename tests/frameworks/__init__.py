"""Frameworks in cells: the same script under ddip and under torchrun, and again after faults.

The scripts are in scripts/.
"""
