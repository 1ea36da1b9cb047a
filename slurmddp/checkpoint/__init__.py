"""Write, verify and read durable checkpoints of tensors and plain values; nothing is pickled."""
