"""The services as child processes on this machine."""
