"""Write the distributed cells of a session as a script for torchrun; pure functions of text, without processes."""
