"""Save this rank's variables to a folder, and load them into a group of any size (``%dipsave``, ``%dipload``)."""
