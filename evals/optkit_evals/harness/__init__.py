"""What the eval `lm_eval` asks EleutherAI's harness, and what it makes of the answers.

names            which names files define: the harness' own are found without importing it
definitions      a task's YAML: ours in tasks/, the harness' own or the user's
groups           what a name stands for: a task, or a group of tasks
task             a task or group that a recipe names, pinned
opening          tasks and groups as objects of the harness, with their data
asking           builds the requests of tasks, scores the answers of a model item by item
language_model   a session as the harness' language model
scores           scores of items as metrics
aggregating      numbers of groups
flips            what turned between two models
"""
