"""The process group of all ranks: rendezvous, release and rebuild."""
