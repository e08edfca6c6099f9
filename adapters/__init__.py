"""Answer requests: one backend a file or folder."""
