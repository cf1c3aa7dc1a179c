"""Rows on their way into a step: drawn, read, collated, and looked at before."""
