"""Which examples a step is made of."""
