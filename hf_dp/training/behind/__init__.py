"""The trainer behind DPTrainerMixin: its rows, its loss, and what of it a private run cannot honour."""
