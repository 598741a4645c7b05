"""Sessions at draft services: of a coordinator's requests, and of those of a server that is not Paceline's."""
