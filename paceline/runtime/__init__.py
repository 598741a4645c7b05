"""What every process needs: settings, logs and exit codes, traces, compiled loops."""
