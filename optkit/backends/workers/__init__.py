"""One script per library. They run in the library's environment, where there is no optkit: nothing
of optkit is imported here.
"""
