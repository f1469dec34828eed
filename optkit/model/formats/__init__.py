"""What a directory of weights holds: one file for each format, and the registry of them."""
