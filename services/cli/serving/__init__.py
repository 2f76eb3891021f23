"""``aerie serve``: each service as a process, until a signal ends it."""
