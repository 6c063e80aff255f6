"""The prefill role: computes prompts and pushes their KV to decode instances."""
