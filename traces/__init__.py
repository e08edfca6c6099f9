"""Make input: one reader a format, a generator, transforms."""
