"""What is needed to prove a backend right; so far the oracle."""
