"""Where noise comes from."""
