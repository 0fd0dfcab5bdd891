"""The conformance kit: an oracle, inputs that reach corner cases, and error budgets, to check a backend."""
