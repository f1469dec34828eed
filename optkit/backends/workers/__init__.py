"""One script per library, run in the library's environment.
optkit is not there, and nothing of it is imported here.
"""
