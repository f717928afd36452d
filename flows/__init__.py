"""What a person triggers: flows and the command line."""
