"""gRPC: links, servers, channels and the error table."""
