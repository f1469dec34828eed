"""Start a child process, talk to it, end it."""
