"""`hf-dp demo`: a small language model that leaks planted secrets, and one that does not."""
