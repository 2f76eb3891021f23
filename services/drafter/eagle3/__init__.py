"""EAGLE-3: one decoder layer over several taps of the target (Li et al., arXiv 2503.01840)."""
