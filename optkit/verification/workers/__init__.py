"""Programs that run in an engine's own Python (3.10 or newer) and import nothing of optkit: a
request in JSON, an answer in JSON.
"""
