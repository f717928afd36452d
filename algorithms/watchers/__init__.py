"""The callbacks that come with flowtune: early stopping, samples, tables and trackers."""
