"""The OpenAI-compatible HTTP gateway: bodies into requests of the orchestrator, its chunks into bodies and events."""
