"""Tables and figures about ranks, cells, profiles and models."""
