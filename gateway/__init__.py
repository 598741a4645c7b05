"""HTTP in front of coordinators: OpenAI's and Anthropic's shapes, and pages."""
