"""llama.cpp as an engine: any GGUF file, on every device that its library computes on. Nothing here imports torch."""
