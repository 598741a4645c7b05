"""The laboratory's commands: options alone, so that they load nothing that measures before they run."""
