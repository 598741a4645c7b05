"""What the Makefile runs beside the project's own packages."""
