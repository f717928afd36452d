"""Everything outside the process: compute and storage."""
