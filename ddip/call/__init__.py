"""``in_torchddp``: call one function of the notebook on all ranks, without magics."""
