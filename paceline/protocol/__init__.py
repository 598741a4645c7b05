"""What services say to each other: frozen messages, errors, and their one conversion to protobuf."""
