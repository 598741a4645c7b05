"""Anthropic's Messages and OpenAI's Responses, translated to a chat and back."""
