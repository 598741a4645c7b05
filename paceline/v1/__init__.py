"""Generated protobuf and gRPC stubs; `make stubs` writes them."""
