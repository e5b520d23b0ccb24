"""Save, restore and describe each rank's training state, including sharded models; depends only on torch."""
