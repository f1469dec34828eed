"""Start a child process, talk to it, end it.

child           `Child` starts one, gives it orders, draws its progress, returns its results or raises;
                `collect` hears several that work together
child_program   what runs in a child: the standard library alone, so that it runs in any
                environment; the messages are listed there
commands        other programs: run in a group of their own, and ended with all of that group
crashes         what a child that failed becomes here: its own error, or how its process ended
signals         being asked to end by a signal, and the safe points that hear of it
"""
