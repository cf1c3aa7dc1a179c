"""The seam to Transformers: DPTrainer and what it needs."""
