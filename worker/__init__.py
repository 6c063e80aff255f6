"""What the prefill and the decode worker share: process, engine thread, registration, services."""
