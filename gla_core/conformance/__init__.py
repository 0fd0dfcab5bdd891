"""What it takes to prove a backend right: the oracle, inputs that reach the corners, and error budgets."""
