"""What the error of each layer costs: gradients, memory, budgets."""
