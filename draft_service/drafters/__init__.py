"""The ways to draft, one file each, behind `interface.Drafter`."""
