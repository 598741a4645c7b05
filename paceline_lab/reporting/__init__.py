"""What every report states, and how: machine, versions, figures with their spread, tables and plots."""
