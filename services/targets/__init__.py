"""Target models: loaders, the three seams, taps and the load-time self-check."""
