"""What every service stands on. Knows nothing of language models."""
