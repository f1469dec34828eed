"""One script per library, run in the library's environment, where there is no optkit: nothing of
optkit is imported here.
"""
