"""The decode role: has prompts computed elsewhere, receives their KV and generates tokens."""
