"""The HTTP gateway: OpenAI's API in front of coordinators, as a gRPC client of theirs."""
