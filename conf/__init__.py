"""One of each: the Hydra configuration, a folder a group."""
