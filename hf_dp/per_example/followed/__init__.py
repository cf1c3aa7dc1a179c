"""Whose the rows are that a model picks by what is in them: followed through its operations."""
