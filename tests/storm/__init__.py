"""A storm on the command line: `make storm`, or `python -m tests.storm --only kills --cases 10
--seed 3`.
"""
