"""llama.cpp's C library: finding one, its structures and its functions."""
