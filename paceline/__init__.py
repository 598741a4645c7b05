"""What two or more Paceline services share; imports no service."""
