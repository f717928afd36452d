"""The embedded engine: a server that speaks the Tinker protocol."""
