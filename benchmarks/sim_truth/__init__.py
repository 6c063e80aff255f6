"""A live cluster beside its simulation: the same calls, the same profiles, the same policy."""
