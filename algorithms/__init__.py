"""What trains: recipes that build batches, and what they need. Knows nothing of Prefect."""
