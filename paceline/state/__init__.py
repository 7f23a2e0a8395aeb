"""Where model state lives: its description, the layout in pieces, a shard's values and optimizer, a worker's copy."""
