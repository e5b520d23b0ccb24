"""Divide a fastai training among ranks: data, random numbers, gradients, metrics."""
