"""The verifier service: sessions, KV cache, batching and tree verification. It owns the target."""
