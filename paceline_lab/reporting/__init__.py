"""Contents and form of every report: machine, versions, figures with their spread, tables and plots."""
