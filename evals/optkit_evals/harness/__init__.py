"""What the eval `lm_eval` asks EleutherAI's harness, and what it makes of the answers.

definitions      task definitions as YAML: ours in tasks/, the harness' own and the user's; read without the harness
task             a task that a recipe names, pinned
asking           loads tasks, builds their requests, scores the answers of a model item by item
language_model   a session as the harness' language model
scores           scores of items as metrics
flips            what turned between two models
"""
