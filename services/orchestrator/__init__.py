"""The orchestrator service: sessions, routing and text. It speaks to the others through ports only."""
