"""What a client can see of the engine, held against plain transformers and torch.

Everything goes through the real SDK over HTTP to an engine in a process of its own; the numbers
come from `reference`, which shares no code with the engine.
"""
