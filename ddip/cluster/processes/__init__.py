"""Processes of this host: preloaded, forked, owned, ended and diagnosed."""
