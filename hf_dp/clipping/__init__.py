"""What one example may add: norms to coefficients, and the sensitivity that follows."""
