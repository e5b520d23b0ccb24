"""The process group of all ranks: rendezvous, abort and rebuild."""
