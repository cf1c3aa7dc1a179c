"""What is kept of a training, and what goes on from it, with its ledger."""
