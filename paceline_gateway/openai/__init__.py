"""OpenAI's API: chat completions and completions, with what vLLM's users add."""
