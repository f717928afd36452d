"""Training runs that are killed and continued, and compared with runs that nothing happened to."""
