"""Which examples are hidden together."""
