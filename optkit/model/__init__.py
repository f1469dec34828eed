"""Models as directories: reading, writing, and holding one block of them in memory at a time."""
