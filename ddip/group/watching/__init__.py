"""Observation of ranks while their cells run: values of variables, and activity."""
