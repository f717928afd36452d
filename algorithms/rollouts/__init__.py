"""What a model does on its own: conversations sampled from the weights in training."""
