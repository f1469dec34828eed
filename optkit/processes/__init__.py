"""Start a child process, talk to it, end it.

start           how a process is started in a group of its own, and ended with all of that group
parent_side     the parent's side: `Child` gives orders, draws progress, returns results or raises;
                `collect` hears several that work together
child_side      the child's side and its entry: the standard library alone, so that it runs in any
                environment; the messages are listed there
crashes         what a child that failed becomes here: its own error, or how its process ended
signals         being asked to end by a signal, and the safe points that hear of it
"""
