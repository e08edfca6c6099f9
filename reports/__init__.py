"""Read run directories and draw: one report a file."""
