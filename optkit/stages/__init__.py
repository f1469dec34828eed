"""The built-in stages, one file each."""
