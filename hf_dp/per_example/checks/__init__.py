"""What is asked of a model, its loss and its rows before anything is spent, and of each step."""
