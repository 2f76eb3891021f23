"""The pure domain of speculative decoding: NumPy only, no I/O, no model, no MLX."""
