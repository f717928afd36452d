"""Prefect tasks: one unit of retry, caching and display each."""
