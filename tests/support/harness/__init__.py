"""What the tests with real processes share: tiny models, the real server, real vLLM engines."""
