"""Programs that run in an engine's own Python (3.10 or newer) and import nothing of optkit.
A request comes in JSON, and so does the answer.
"""
