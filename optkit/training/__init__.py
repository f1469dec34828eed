"""Training of a model: data, teacher, losses, the loop with its checkpoints.

Everything here needs torch, so stages import it inside their methods.
"""
