"""Other people's quantizers, each library in an environment of its own.
It runs as a subprocess that speaks JSON lines.
"""
