"""Objects in a folder or on S3, and how a run is laid out in them."""
