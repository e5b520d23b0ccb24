"""Division of a fastai training among ranks: data, random numbers, gradients, metrics."""
