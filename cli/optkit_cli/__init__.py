"""The command line of optkit: each command is one module, imported when it is called."""
